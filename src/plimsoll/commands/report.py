"""`plimsoll report RUN`, and the end of a run: what it learned and what it took, as text and as one
HTML file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from plimsoll.errors import ConfigError
from plimsoll.page.answers import frozen
from plimsoll.page.comparison import (
    Comparison,
    compare,
    drop_lone_nodes,
    fullest_of_kinds,
    nearest_to_line,
    process_kind,
)
from plimsoll.page.html import RUNS, render_page
from plimsoll.page.watched import read_whole_run, watch_runs
from plimsoll.run.counting import gigabytes_text
from plimsoll.run.directory import RunDirectory, existing_run
from plimsoll.run.ending import read_end
from plimsoll.run.files import write_whole
from plimsoll.run.leaks import find_leaks
from plimsoll.run.ledger import LedgerRow, is_node, read_ledger

_COLUMNS = ("process", "phase", "memory", "predicted", "measured", "over", "seconds")
_FORMAT = "{:<14} {:<13} {:<9} {:>9} {:>9} {:>7} {:>9}"


def report_run(path: Path) -> str:
    """Write RUN/report.html whole, and return what it says of memory for a terminal of 80 columns.

    Raises ConfigError where there is no run or no ledger, PlimsollError for a broken line.
    """
    run = existing_run(path)
    failure = _failure(run)
    try:
        rows = read_ledger(run.ledger_path)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *failure])) from error
    shown = drop_lone_nodes(rows)
    every = compare(shown)
    comparisons = fullest_of_kinds(every)
    remarks = [*_several(every), nearest_text(*nearest_to_line(rows))]
    remarks += [f"Leak: {leak.text}." for leak in find_leaks(rows)]
    seen = [read_whole_run(one) for one in watch_runs([path])]
    write_whole(run.report_path, render_page(str(path), frozen(seen, remarks), RUNS))
    written = f"Written to {run.report_path}."
    return "\n".join([*failure, table_text(comparisons), "", *remarks, written])


def _failure(run: RunDirectory) -> list[str]:
    """Return what is said of a run that failed; nothing of others."""
    end = read_end(run.end_path)
    if end is None or end.how != "failed":
        return []
    return [f"The run {end}", f"Its log, with the traceback: {run.log_path}"]


def table_text(comparisons: Iterable[Comparison]) -> str:
    """A line for each number of each process and phase; 80 columns."""
    return "\n".join(
        _FORMAT.format(*cells).rstrip() for cells in (_COLUMNS, *map(_cells, comparisons))
    )


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
    if len({process_kind(process) for process in processes}) < len(processes):
        yield "Of several processes of a kind each phase's fullest; ledger.jsonl has all of them."


def nearest_text(who: LedgerRow, fullest: LedgerRow) -> str:
    """What was nearest the line."""
    held, line = fullest.measured.fullest, fullest.line
    what = "node" if is_node(fullest) else "card"
    return (
        f"Nearest the line: {who.process} in {who.phase}, step {who.step}. The run held "
        f"{gigabytes_text(held)} of its {what}'s {gigabytes_text(line.capacity)} "
        f"({held / line.capacity:.0%}); {gigabytes_text(line.used)} were in use by all "
        "that ran there."
    )
