"""Where a run is, what it has come to, and what is not healthy, as JSON."""

from __future__ import annotations

import time
from math import nan
from typing import Any

import numpy as np
import pyarrow.compute as pc

from plimsoll.config.yaml_tree import value_at
from plimsoll.jobs import JOBS
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
from plimsoll.run.step_report import BEFORE_STEPS, headline

_RECENT = 100
"""Steps whose mean time says how long the others will take."""


def progress(run: Watched, at: float | None = None) -> dict[str, Any]:
    """Where a run is. at: the time, seconds since 1970; default: now."""
    at = time.time() if at is None else at
    settings, last = run.settings, run.metrics.last
    done = int(last.get("step", 0))
    steps = (run.now and run.now.steps) or value_at(settings, ("run", "steps")) or 0
    state, seconds = _state(run), _seconds_per_step(run)
    known = {name: nan if value is None else value for name, value in last.items()}
    metrics = {name: value for name, value in known.items() if name != "step"}
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
        "headline": {name: number_text(one) for name, one in headline(metrics).items()},
        "warnings": _warnings(done, metrics),
    }


def _state(run: Watched) -> str:
    """Return `running`, or how the run came to an end: `out of memory`, `done`, `stopped`,
    `killed` without a word, or `failed: ` with the first line of the error."""
    if run.now is not None and not run.now.ended:
        return "running"
    if run.run.out_of_memory_path.is_file():
        return "out of memory"
    if run.end is not None:
        return str(run.end)
    if run.now is not None:
        return "killed"
    return "done" if run.run.model_path.is_dir() else "stopped"


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
