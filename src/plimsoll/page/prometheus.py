"""The latest figures of watched runs in Prometheus' text format, version 0.0.4.

A metric of metrics.jsonl becomes a gauge: `actor/loss` is `plimsoll_actor_loss`. What follows
`seconds/` and `memory_bytes/` becomes a label. Each sample is labelled with its run and job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.page.progress import progress
from plimsoll.page.watched import Watched

_LABELLED = {"seconds": "phase", "memory_bytes": "process"}
"""Metrics of which the part after the slash is a label, and the label's name."""
_STATES = ("running", "done", "stopped", "failed", "out of memory", "killed")


@dataclass(frozen=True)
class _Gauge:
    """One sample, and the name that it has in metrics.jsonl or a description."""

    name: str
    help: str
    labels: Mapping[str, str]
    value: float | None


def prometheus_text(runs: Sequence[Watched], at: float | None = None) -> str:
    """Return the last step's metrics of each run, and the runs' states, as Prometheus reads them.

    `at` is the present time in seconds since 1970; default: the clock.
    """
    families: dict[str, list[_Gauge]] = {}
    for run in runs:
        for gauge in (*_run_gauges(run, at), *_metric_gauges(run)):
            families.setdefault(gauge.name, []).append(gauge)
    return "".join(line for name in families for line in _family(name, families[name]))


def _run_gauges(run: Watched, at: float | None) -> Iterator[_Gauge]:
    now = progress(run, at)
    labels = _labels(run)
    yield _Gauge("plimsoll_step", "The last step that is done", labels, now["step"])
    yield _Gauge("plimsoll_steps", "The steps of the run; 0: not known", labels, now["steps"])
    ago = now["writtenAgo"]
    yield _Gauge("plimsoll_written_seconds", "Seconds since the last step", labels, ago)
    unhealthy = len(now["warnings"])
    yield _Gauge("plimsoll_warnings", "Figures outside of their healthy range", labels, unhealthy)
    for state in _STATES:
        is_now = now["state"].partition(":")[0] == state
        text = "1 for the state of the run, 0 for the others"
        yield _Gauge("plimsoll_state", text, {**labels, "state": state}, float(is_now))


def _labels(run: Watched) -> dict[str, str]:
    return {"run": run.name, "job": run.job or ""}


def _metric_gauges(run: Watched) -> Iterator[_Gauge]:
    for key, value in run.metrics.last.items():
        if key == "step" or not isinstance(value, int | float | None):
            continue
        first, _, rest = key.partition("/")
        label = {_LABELLED[first]: rest} if first in _LABELLED and rest else {}
        name = f"plimsoll_{re.sub('[^a-zA-Z0-9_]', '_', first if label else key)}"
        described = f"{first}/*" if label else key
        yield _Gauge(name, described, _labels(run) | label, value)


def _family(name: str, gauges: Sequence[_Gauge]) -> Iterator[str]:
    """Yield the lines of a metric; metrics whose names become the same get a label `metric`."""
    keys = list(dict.fromkeys(gauge.help for gauge in gauges))
    yield f"# HELP {name} {_escape(', '.join(keys), quoted=False)}\n"
    yield f"# TYPE {name} gauge\n"
    for gauge in gauges:
        labels = {**gauge.labels, **({"metric": gauge.help} if len(keys) > 1 else {})}
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        yield f"{name}{{{pairs}}} {_number(gauge.value)}\n"


def _escape(text: str, *, quoted: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quoted else escaped


def _number(value: float | None) -> str:
    return "NaN" if value is None else repr(float(value))
