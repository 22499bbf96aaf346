"""`plimsoll report RUN`: predicted against measured memory, as text and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from plimsoll.errors import ConfigError
from plimsoll.recipes.report_page import COLUMNS, Page, cells, report_page
from plimsoll.run.comparison import Comparison, Nearest, compare, find_leaks, nearest
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import write_whole
from plimsoll.run.ledger import read_ledger
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.rows import read_rows

_FORMAT = "{:<14} {:<13} {:<9} {:>9} {:>9} {:>7} {:>9}"


def report_run(path: Path) -> str:
    """Write RUN/report.html whole, and return the same for a terminal of 80 columns.

    Raises ConfigError where there is no run or no ledger, PlimsollError for a broken line.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Give the run.directory of a run.")
    run = RunDirectory(path)
    rows = read_ledger(run.ledger_path)
    comparisons = compare(rows)
    remarks = [nearest_text(nearest(rows)), *(f"Leak: {leak.text}." for leak in find_leaks(rows))]
    page = Page(
        title=str(path),
        remarks=remarks,
        comparisons=comparisons,
        metrics=read_rows(run.metrics_path) if run.metrics_path.is_file() else [],
        calibration=_bytes(run.calibration_path),
        drawing=_text(run.plan_svg_path),
        config=_text(run.config_path) or "",
    )
    write_whole(run.report_path, report_page(page))
    return "\n".join([table_text(comparisons), "", *remarks, f"Written to {run.report_path}."])


def table_text(comparisons: Iterable[Comparison]) -> str:
    """A line for each number of each process and phase; 80 columns."""
    lines = [_FORMAT.format(*COLUMNS)]
    for one in comparisons:
        lines.append(_FORMAT.format(*cells(one)).rstrip())
    return "\n".join(lines)


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


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
