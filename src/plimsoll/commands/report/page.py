"""The report of a run as one HTML file that needs nothing beside it."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from plimsoll.commands.report.comparison import Comparison, kind_of, peaks_by_step
from plimsoll.commands.report.curves import draw_panels
from plimsoll.commands.report.metrics import (
    bounds_text,
    curve_panels,
    evaluations,
    held_out_figures,
    memory_panel,
    number_text,
    time_panels,
    total_seconds,
)
from plimsoll.config.yaml_tree import read_tree, value_at
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import named_job
from plimsoll.run.counting import duration_text, gigabytes_text
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import Row, read_rows
from plimsoll.run.ledger import LedgerRow
from plimsoll.run.responses import read_some
from plimsoll.run.state import RunState
from plimsoll.run.step_report import BEFORE_STEPS

_RESPONSES = 5


def report_page(
    run: RunDirectory,
    ledger: Sequence[LedgerRow],
    comparisons: Sequence[Comparison],
    remarks: Sequence[str],
) -> str:
    """The whole file. comparisons: of the fullest process of each kind in each phase of the ledger;
    remarks: sentences about memory."""
    config = run.config_path.read_text(encoding="utf-8") if run.config_path.is_file() else ""
    metrics = read_rows(run.metrics_path) if run.metrics_path.is_file() else []
    text: str = _template().render(
        title=str(run.path),
        step=metrics[-1]["step"] if metrics else 0,
        calibration=_bytes(run.calibration_path),
        plan=_bytes(run.plan_svg_path),
        config=config,
        remarks=remarks,
        **_learned(run, config, metrics),
        **_time(metrics),
        **_memory(ledger, comparisons),
    )
    return text


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "base64": lambda data: b64encode(data).decode(),
        "bounds": bounds_text,
        "duration": duration_text,
        "gigabytes": gigabytes_text,
        "kind": kind_of,
        "number": number_text,
    }
    source = files("plimsoll.commands.report").joinpath("page.html.j2")
    return environment.from_string(source.read_text(encoding="utf-8"))


def _learned(run: RunDirectory, config: str, metrics: Sequence[Row]) -> dict[str, Any]:
    """What was learned; job and steps: None where the config does not say them."""
    settings, job = read_tree(config, "config.yaml").values, named_job(config)
    panels = curve_panels(JOBS[job].panels if job else (), metrics)
    evaluated = evaluations(metrics, _best_step(run, settings))
    held_out = held_out_figures(evaluated.values())
    sampled = run.latest_trajectories()
    return {
        "job": job,
        "model": value_at(settings, ("actor", "model", "path")),
        "steps": value_at(settings, ("run", "steps")),
        "evaluations": list(evaluated),
        "held_out": held_out,
        "has_intervals": any(one and bounds_text(one) for own in held_out.values() for one in own),
        "labels": {name: f"{one.title}, {one.unit}" for one in panels for name in one.series},
        "curves": draw_panels(metrics, panels),
        "sampled_step": sampled and sampled[0],
        "responses": sampled and read_some(sampled[1], _RESPONSES),
    }


def _best_step(run: RunDirectory, settings: Any) -> int | None:
    """Of a run that looks for its best evaluation, and has a checkpoint."""
    latest = run.latest_checkpoint()
    if latest is None or value_at(settings, ("run", "best")) is None:
        return None
    return RunState.load(latest[1] / "state.json").best_step


def _time(metrics: Sequence[Row]) -> dict[str, Any]:
    """Where the time went. Reading data and loading are no part of any step."""
    seconds = total_seconds(metrics)
    steps = [row for row in metrics if row["step"] > 0]  # 0 is an evaluation before training
    return {
        "seconds": seconds,
        "before_steps": {phase: s for phase, s in seconds.items() if phase in BEFORE_STEPS},
        "in_steps": {phase: s for phase, s in seconds.items() if phase not in BEFORE_STEPS},
        "time_curves": draw_panels(steps, time_panels(steps)),
    }


def _memory(ledger: Sequence[LedgerRow], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What was held. memory: by process and phase, the comparisons by their measures; processes:
    how many there are of a kind."""
    peaks = peaks_by_step(ledger)
    together = groupby(comparisons, lambda one: (one.process, one.phase))
    return {
        "memory": [{one.measure: one for one in own} for _, own in together],
        "processes": Counter(map(kind_of, {row.process for row in ledger})),
        "memory_curves": draw_panels(peaks, [memory_panel(peaks)]),
    }


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
