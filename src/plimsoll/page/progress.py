"""The progress of runs: as JSON for the page, and as the latest figures for Prometheus.

The JSON has a run's results, health warnings and the end of its log. Prometheus' text format is
version 0.0.4. A metric of metrics.jsonl becomes a gauge: `actor/loss` is `plimsoll_actor_loss`.
What follows `seconds/` and `memory_bytes/` becomes a label. Each sample is labelled with its run
and job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
import pyarrow.compute as pc

from plimsoll.config.yaml_tree import value_at
from plimsoll.jobs import JOBS
from plimsoll.page.curves import (
    bounds_text,
    curve_panels,
    evaluations,
    held_out_figures,
    metric_names,
    number_text,
    unweighted_parts,
)
from plimsoll.page.watched import Watched
from plimsoll.run.displays import BEFORE_STEPS, headline
from plimsoll.run.ending import how_to_go_on
from plimsoll.run.health import due_warnings
from plimsoll.run.state import RunState

_MOST_BYTES, _MOST_LINES = 64 * 2**10, 300


def log_bytes(run: Watched) -> int | None:
    """Return the size of a run's log, or None if the run writes none."""
    path = run.run.log_path
    return path.stat().st_size if path.is_file() else None


def console(run: Watched) -> dict[str, Any]:
    """Return the last lines of a run's log.

    `lines` are whole, except for the last, which may be incomplete.
    `cut` says whether there are lines before them. `bytes` is the size that `log_bytes` returns.
    """
    size = log_bytes(run)
    if size is None:
        return {"bytes": None, "cut": False, "lines": []}
    begin = max(0, size - _MOST_BYTES)
    with run.run.log_path.open("rb") as file:
        file.seek(begin)
        text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    lines = text.split("\n")[1 if begin else 0 :]
    lines = lines[:-1] if lines and not lines[-1] else lines
    cut = begin > 0 or len(lines) > _MOST_LINES
    last_lines = [line.rstrip("\r") for line in lines[-_MOST_LINES:]]
    return {"bytes": size, "cut": cut, "lines": last_lines}


_RECENT = 100
"""Number of last steps whose mean time predicts the time that is left."""
_HELD_OUT = "eval/"
_SPEEDS = ("tokens_per_second", "mfu", "gpu_busy")


def progress(run: Watched, at: float | None = None) -> dict[str, Any]:
    """Return the progress of a run as JSON.

    `at` is the present time in seconds since 1970; default: the clock.
    """
    at = time.time() if at is None else at
    settings, last, written = run.settings, run.metrics.last, run.run.metrics_path
    done = int(last.get("step", 0))
    steps = (run.now and run.now.steps) or value_at(settings, ("run", "steps")) or 0
    state, seconds = _state(run), _seconds_per_step(run)
    numbers = {name: nan if value is None else value for name, value in last.items()}
    metrics = {name: value for name, value in numbers.items() if name != "step"}
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
        "seconds": sum(phase_seconds(run).values()),
        "writtenAgo": max(at - written.stat().st_mtime, 0.0) if written.is_file() else None,
        "unread": run.unread,
        "version": run.version,
        "problem": run.problem,
        "goOn": "" if state in ("running", "done") else how_to_go_on(run.run),
        "speed": {name: _recent_mean(run, name) for name in _SPEEDS},
        "headline": {name: number_text(figure) for name, figure in headline(trained).items()},
        "heldOut": _last_held_out(run),
        "logBytes": log_bytes(run),
        "warnings": _warnings(done, metrics),
    }


def _recent_mean(run: Watched, name: str) -> float | None:
    values = run.metrics.column(name)[-_RECENT:]
    recent = values[np.isfinite(values) & (run.metrics.column("step")[-_RECENT:] > 0)]
    return float(recent.mean()) if len(recent) else None


def _last_held_out(run: Watched) -> dict[str, Any] | None:
    if not run.metrics.evaluated:
        return None
    row = run.metrics.evaluated[-1]
    measured = {n: nan if x is None else x for n, x in row.items() if n.startswith(_HELD_OUT)}
    figures = {
        name.removeprefix(_HELD_OUT): f"{number_text(x)} ({bounds_text(x)})".removesuffix(" ()")
        for name, x in headline(measured).items()
    }
    return {"step": row["step"], "figures": figures}


def _state(run: Watched) -> str:
    """Return the state of a run.

    It is `running`, `done`, `stopped`, `out of memory`, `killed` if it ended without writing how,
    or `failed: ` with the first line of the error. A run that writes no model is done after its
    last step.
    """
    if run.now is not None and not run.now.has_ended:
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


def _seconds_per_step(run: Watched) -> float | None:
    names = [n for n in _phases(run) if n not in BEFORE_STEPS]
    steps = run.metrics.column("step")[-_RECENT:]
    if not names or not (steps > 0).any():
        return None
    seconds = np.nansum([run.metrics.column(f"seconds/{n}")[-_RECENT:] for n in names], axis=0)
    return float(seconds[steps > 0].mean())


def _phases(run: Watched) -> list[str]:
    return [n.removeprefix("seconds/") for n in metric_names([run.metrics.names], "seconds/")]


def phase_seconds(run: Watched) -> dict[str, float]:
    """Return the total seconds of each phase."""
    rows = run.metrics.rows
    return {phase: pc.sum(rows[f"seconds/{phase}"]).as_py() or 0.0 for phase in _phases(run)}


def _warnings(step: int, metrics: dict[str, float]) -> list[dict[str, str]]:
    return [
        {
            "metric": warning.metric,
            "text": f"{warning.headline}.",
            "means": warning.advice.means,
            "attempt": warning.advice.attempt,
        }
        for warning in due_warnings(step, metrics)
    ]


def seconds(run: Watched) -> dict[str, Any]:
    """Return the total seconds of each phase, in two groups: before the steps, and in them."""
    totals = phase_seconds(run)
    return {
        "before": {phase: s for phase, s in totals.items() if phase in BEFORE_STEPS and s},
        "steps": {phase: s for phase, s in totals.items() if phase not in BEFORE_STEPS},
    }


def held_out(run: Watched) -> dict[str, Any]:
    """Return the held-out figures of the first, the best and the last evaluation.

    A cell has a number and its interval as texts, or is None if the evaluation lacks the figure.
    """
    by_label = evaluations(run.metrics.evaluated, _best_step(run))
    job = JOBS[run.job] if run.job else None
    names = [run.metrics.names]
    panels = curve_panels(job.panels if job else (), names, unweighted_parts(run))
    labels = {name: f"{panel.title}, {panel.unit}" for panel in panels for name in panel.series}
    figures_by_name = held_out_figures(by_label.values())
    return {
        "columns": list(by_label),
        "rows": [
            {
                "name": name,
                "label": labels.get(name, ""),
                "cells": [
                    panel and [number_text(panel), bounds_text(panel)] for panel in row_figures
                ],
            }
            for name, row_figures in figures_by_name.items()
        ],
    }


def _best_step(run: Watched) -> int | None:
    latest = run.run.latest_checkpoint()
    if latest is None or value_at(run.settings, ("run", "best")) is None:
        return None
    return RunState.load(latest[1] / "state.json").best_step


_LABELLED = {"seconds": "phase", "memory_bytes": "process"}
"""Metrics of which the part after the slash is a label, and the label's name."""
_STATES = ("running", "done", "stopped", "failed", "out of memory", "killed")


_Gauge = tuple[str, str, Mapping[str, str], float | None]
"""One sample: its metric, a description or its name in metrics.jsonl, its labels and its value."""


def prometheus_text(runs: Sequence[Watched], at: float | None = None) -> str:
    """Return the last step's metrics of each run, and the runs' states, as Prometheus reads them.

    `at` is the present time in seconds since 1970; default: the clock.
    """
    families: dict[str, list[_Gauge]] = {}
    for run in runs:
        for gauge in (*_run_gauges(run, at), *_metric_gauges(run)):
            families.setdefault(gauge[0], []).append(gauge)
    return "".join(line for name in families for line in _family(name, families[name]))


def _run_gauges(run: Watched, at: float | None) -> Iterator[_Gauge]:
    now = progress(run, at)
    labels, unhealthy = _labels(run), len(now["warnings"])
    yield "plimsoll_step", "The last step that is done", labels, now["step"]
    yield "plimsoll_steps", "The steps of the run; 0: not known", labels, now["steps"]
    yield "plimsoll_written_seconds", "Seconds since the last step", labels, now["writtenAgo"]
    yield "plimsoll_warnings", "Figures outside of their healthy range", labels, unhealthy
    for state in _STATES:
        is_now = now["state"].partition(":")[0] == state
        text = "1 for the state of the run, 0 for the others"
        yield "plimsoll_state", text, {**labels, "state": state}, float(is_now)


def _labels(run: Watched) -> dict[str, str]:
    return {"run": run.name, "job": run.job or ""}


def _metric_gauges(run: Watched) -> Iterator[_Gauge]:
    for key, value in run.metrics.last.items():
        if key == "step" or not isinstance(value, int | float | None):
            continue
        first, _, rest = key.partition("/")
        label = {_LABELLED[first]: rest} if first in _LABELLED and rest else {}
        name = f"plimsoll_{re.sub('[^a-zA-Z0-9_]', '_', first if label else key)}"
        yield name, f"{first}/*" if label else key, _labels(run) | label, value


def _family(name: str, gauges: Sequence[_Gauge]) -> Iterator[str]:
    """Yield the lines of a metric; metrics whose names become the same get a label `metric`."""
    keys = list(dict.fromkeys(about for _, about, _, _ in gauges))
    yield f"# HELP {name} {_escape(', '.join(keys), quoted=False)}\n"
    yield f"# TYPE {name} gauge\n"
    for _, about, own_labels, value in gauges:
        labels = {**own_labels, **({"metric": about} if len(keys) > 1 else {})}
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        number = "NaN" if value is None else repr(float(value))
        yield f"{name}{{{pairs}}} {number}\n"


def _escape(text: str, *, quoted: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quoted else escaped
