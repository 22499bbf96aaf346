"""Where a run is, what it has come to, and what is not healthy, as JSON."""

from __future__ import annotations

import time
from math import nan
from typing import Any

import numpy as np
import pyarrow.compute as pc

from plimsoll.config.yaml_tree import value_at
from plimsoll.jobs import JOBS
from plimsoll.page.console import log_bytes
from plimsoll.page.metrics import (
    bounds_text,
    curve_panels,
    evaluations,
    held_out_figures,
    metric_names,
    number_text,
)
from plimsoll.page.watched import Watched
from plimsoll.run.health import warnings_of
from plimsoll.run.health_ranges import RANGES
from plimsoll.run.state import RunState
from plimsoll.run.step_report import BEFORE_STEPS, Figure, headline

_RECENT = 100
"""Steps whose mean time says how long the others will take."""
_HELD_OUT = "eval/"
_SPEEDS = ("tokens_per_second", "mfu", "gpu_busy")


def progress(run: Watched, at: float | None = None) -> dict[str, Any]:
    """Where a run is. at: the time, seconds since 1970; default: now."""
    at = time.time() if at is None else at
    settings, last = run.settings, run.metrics.last
    done = int(last.get("step", 0))
    steps = (run.now and run.now.steps) or value_at(settings, ("run", "steps")) or 0
    state, seconds = _state(run), _seconds_per_step(run)
    known = {name: nan if value is None else value for name, value in last.items()}
    metrics = {name: value for name, value in known.items() if name != "step"}
    trained = {name: value for name, value in metrics.items() if not name.startswith(_HELD_OUT)}
    return {
        "name": run.name,
        "path": str(run.run.path),
        "job": run.job,
        "model": value_at(settings, ("actor", "model", "path")),
        "state": state,
        "step": done,
        "steps": steps,
        "phase": run.now.phase if state == "running" and run.now else None,
        "phaseSeconds": at - run.now.since if state == "running" and run.now else None,
        "secondsPerStep": seconds,
        "secondsLeft": seconds and max(steps - done, 0) * seconds if state == "running" else None,
        "seconds": sum(_total_seconds(run).values()),
        "writtenAgo": _written_ago(run, at),
        "unread": run.unread,
        "version": run.version,
        "problem": run.problem,
        "speed": {name: _recent_mean(run, name) for name in _SPEEDS},
        "headline": {name: number_text(one) for name, one in headline(trained).items()},
        "heldOut": _last_held_out(run),
        "logBytes": log_bytes(run),
        "warnings": _warnings(done, metrics),
    }


def _recent_mean(run: Watched, name: str) -> float | None:
    """Return a metric's mean over the last steps that have it; None where none has."""
    values = run.metrics.column(name)[-_RECENT:]
    found = values[np.isfinite(values) & (run.metrics.column("step")[-_RECENT:] > 0)]
    return float(found.mean()) if len(found) else None


def _last_held_out(run: Watched) -> dict[str, Any] | None:
    """Return the figures of the last evaluation with the step that it was after; None before the
    first one."""
    if not run.metrics.evaluated:
        return None
    row = run.metrics.evaluated[-1]
    measured = {n: nan if x is None else x for n, x in row.items() if n.startswith(_HELD_OUT)}
    shown = {
        name.removeprefix(_HELD_OUT): " ".join(filter(None, (number_text(one), _interval(one))))
        for name, one in headline(measured).items()
    }
    return {"step": row["step"], "figures": shown}


def _interval(figure: Figure) -> str:
    bounds = bounds_text(figure)
    return f"({bounds})" if bounds else ""


def _state(run: Watched) -> str:
    """Return `running`, or how the run came to an end: `out of memory`, `done`, `stopped`,
    `killed` without a word, or `failed: ` with the first line of the error. A run that writes no
    model is done after its last step."""
    if run.now is not None and not run.now.ended:
        return "running"
    if run.run.out_of_memory_path.is_file():
        return "out of memory"
    if run.end is not None:
        return str(run.end)
    if run.now is not None:
        return "killed"
    done = run.run.model_path.is_dir() or run.run.best_path.is_file()
    if value_at(run.settings, ("run", "save_model")) is False:
        done |= run.metrics.last.get("step") == value_at(run.settings, ("run", "steps"))
    return "done" if done else "stopped"


def _written_ago(run: Watched, at: float) -> float | None:
    path = run.run.metrics_path
    return max(at - path.stat().st_mtime, 0.0) if path.is_file() else None


def _seconds_per_step(run: Watched) -> float | None:
    """The mean of the last steps, without what comes before the first one."""
    names = [n for n in _phases(run) if n not in BEFORE_STEPS]
    steps = run.metrics.column("step")[-_RECENT:]
    if not names or not (steps > 0).any():
        return None
    seconds = np.nansum([run.metrics.column(f"seconds/{n}")[-_RECENT:] for n in names], axis=0)
    return float(seconds[steps > 0].mean())


def _phases(run: Watched) -> list[str]:
    return [n.removeprefix("seconds/") for n in metric_names([run.metrics.names], "seconds/")]


def _total_seconds(run: Watched) -> dict[str, float]:
    rows = run.metrics.rows
    return {phase: pc.sum(rows[f"seconds/{phase}"]).as_py() or 0.0 for phase in _phases(run)}


def _warnings(step: int, metrics: dict[str, float]) -> list[dict[str, str]]:
    """What is not healthy at the last step."""
    settled = [one for one in warnings_of(metrics) if step > RANGES[one.metric].settles]
    return [
        {
            "metric": one.metric,
            "text": str(one).removeprefix("warning: ").partition(". ")[0] + ".",
            "means": one.advice.means,
            "attempt": one.advice.attempt,
        }
        for one in settled
    ]


def seconds(run: Watched) -> dict[str, Any]:
    """The seconds of each phase, those before the steps for themselves."""
    totals = _total_seconds(run)
    return {
        "before": {phase: s for phase, s in totals.items() if phase in BEFORE_STEPS and s},
        "steps": {phase: s for phase, s in totals.items() if phase not in BEFORE_STEPS},
    }


def held_out(run: Watched) -> dict[str, Any]:
    """The held-out figures of the first, the best and the last evaluation; each cell has a number
    and its interval, both as text, None where that evaluation has no such figure."""
    shown = evaluations(run.metrics.evaluated, _best_step(run))
    job = JOBS[run.job] if run.job else None
    panels = curve_panels(job.panels if job else (), [run.metrics.names])
    labels = {name: f"{one.title}, {one.unit}" for one in panels for name in one.series}
    found = held_out_figures(shown.values())
    return {
        "columns": list(shown),
        "rows": [
            {
                "name": name,
                "label": labels.get(name, ""),
                "cells": [one and [number_text(one), bounds_text(one)] for one in own],
            }
            for name, own in found.items()
        ],
    }


def _best_step(run: Watched) -> int | None:
    """Of a run that looks for its best evaluation, and has a checkpoint."""
    latest = run.run.latest_checkpoint()
    if latest is None or value_at(run.settings, ("run", "best")) is None:
        return None
    return RunState.load(latest[1] / "state.json").best_step
