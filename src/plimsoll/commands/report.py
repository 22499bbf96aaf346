"""`plimsoll report RUN`, and the end of a run: what it learned and what it took, as text and as one
HTML file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.commands.report_page import Page, Sampled, report_page
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import named_job
from plimsoll.run.clock import total_seconds
from plimsoll.run.comparison import (
    Comparison,
    Nearest,
    compare,
    find_leaks,
    fullest_of_kinds,
    kind_of,
    nearest,
    peaks_by_step,
    without_lone_nodes,
)
from plimsoll.run.curves import draw_panels
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import write_whole
from plimsoll.run.held_out import evaluations, held_out_figures
from plimsoll.run.ledger import LedgerRow, read_ledger
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.panels import curve_panels, memory_panel, time_panels
from plimsoll.run.rows import read_rows
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import read_some

_COLUMNS = ("process", "phase", "memory", "predicted", "measured", "over", "seconds")
_FORMAT = "{:<14} {:<13} {:<9} {:>9} {:>9} {:>7} {:>9}"
_RESPONSES = 5


def report_run(path: Path) -> str:
    """Write RUN/report.html whole, and return what it says of memory for a terminal of 80 columns.

    Raises ConfigError where there is no run or no ledger, PlimsollError for a broken line.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Give the run.directory of a run.")
    run = RunDirectory(path)
    rows = read_ledger(run.ledger_path)
    shown = without_lone_nodes(rows)
    every = compare(shown)
    comparisons = fullest_of_kinds(every)
    remarks = [*_several(every), nearest_text(nearest(rows))]
    remarks += [f"Leak: {leak.text}." for leak in find_leaks(rows)]
    write_whole(run.report_path, report_page(_page(run, shown, comparisons, remarks)))
    return "\n".join([table_text(comparisons), "", *remarks, f"Written to {run.report_path}."])


def table_text(comparisons: Iterable[Comparison]) -> str:
    """A line for each number of each process and phase; 80 columns."""
    lines = [_FORMAT.format(*_COLUMNS)]
    for one in comparisons:
        lines.append(_FORMAT.format(*_cells(one)).rstrip())
    return "\n".join(lines)


def _cells(one: Comparison) -> tuple[str, ...]:
    """A comparison as a person reads it; what the plan does not say stays empty."""
    return (
        one.process,
        one.phase,
        one.measure,
        "" if one.predicted is None else gigabytes_text(one.predicted),
        gigabytes_text(one.measured),
        "" if one.over is None else f"{one.over:+.0%}",
        f"{one.seconds:.1f}",
    )


def _several(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """What is said where not every process is shown."""
    processes = {one.process for one in comparisons}
    if len({kind_of(process) for process in processes}) < len(processes):
        yield "Of several processes of a kind each phase's fullest; ledger.jsonl has all of them."


def nearest_text(found: Nearest) -> str:
    """What was nearest the line."""
    row, capacity = found.row, gigabytes_text(found.capacity)
    what = "node" if row.measured.device is None else "card"
    return (
        f"Nearest the line: {row.process} in {row.phase}, step {row.step}. The run held "
        f"{gigabytes_text(found.held)} of its {what}'s {capacity} "
        f"({found.held / found.capacity:.0%}); {gigabytes_text(found.used)} were in use by all "
        "that ran there."
    )


def _page(
    run: RunDirectory,
    ledger: Sequence[LedgerRow],
    comparisons: Sequence[Comparison],
    remarks: Sequence[str],
) -> Page:
    config = _text(run.config_path)
    metrics = read_rows(run.metrics_path) if run.metrics_path.is_file() else []
    job = named_job(config)
    panels = curve_panels(JOBS[job].panels if job else (), metrics)
    evaluated = evaluations(metrics, _best_step(run, config))
    steps = [row for row in metrics if row["step"] > 0]  # 0 is an evaluation before training
    peaks = peaks_by_step(ledger)
    return Page(
        title=str(run.path),
        job=job,
        model=str(_setting(config, "actor", "model", "path") or ""),
        step=metrics[-1]["step"] if metrics else 0,
        steps=_setting(config, "run", "steps"),
        held_out=held_out_figures(evaluated.values()),
        evaluations=list(evaluated),
        labels={name: f"{panel.title}, {panel.unit}" for panel in panels for name in panel.series},
        curves=draw_panels(metrics, panels),
        calibration=_bytes(run.calibration_path),
        sampled=_sampled(run),
        seconds=total_seconds(metrics),
        time_curves=draw_panels(steps, time_panels(steps)),
        remarks=remarks,
        comparisons=comparisons,
        processes=Counter(kind_of(process) for process in {row.process for row in ledger}),
        memory_curves=draw_panels(peaks, [memory_panel(peaks)]),
        plan=_bytes(run.plan_svg_path),
        config=config,
    )


def _setting(config: str, *keys: str) -> Any:
    """Of config.yaml; None where it has none."""
    found: Any = read_tree(config, "config.yaml").values
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _best_step(run: RunDirectory, config: str) -> int | None:
    """Of a run that looks for its best evaluation, and has a checkpoint."""
    latest = run.latest_checkpoint()
    if latest is None or _setting(config, "run", "best") is None:
        return None
    return RunState.load(latest[1] / "state.json").best_step


def _sampled(run: RunDirectory) -> Sampled | None:
    latest = run.latest_trajectories()
    return None if latest is None else Sampled(latest[0], read_some(latest[1], _RESPONSES))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
