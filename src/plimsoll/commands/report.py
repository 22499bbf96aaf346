"""`plimsoll report RUN`: write a run's results and memory as one HTML file, and as text.

The end of a run writes the file, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from plimsoll.errors import ConfigError
from plimsoll.page.answers import freeze_replies
from plimsoll.page.html import RUNS, render_page
from plimsoll.page.ledger import (
    Comparison,
    compare,
    drop_lone_nodes,
    fullest_of_kinds,
    nearest_to_line,
    process_kind,
)
from plimsoll.page.watched import read_whole_run, watch_runs
from plimsoll.run.directory import RunDirectory, existing_run
from plimsoll.run.ending import read_end
from plimsoll.run.files import write_whole
from plimsoll.run.leaks import find_leaks
from plimsoll.run.ledger import LedgerRow, is_node, read_ledger
from plimsoll.run.numbers import gigabytes_text

_COLUMNS = ("process", "phase", "memory", "predicted", "measured", "over", "seconds")
_FORMAT = "{:<14} {:<13} {:<9} {:>9} {:>9} {:>7} {:>9}"


def report_run(path: Path) -> str:
    """Write RUN/report.html, and return its part about memory as text of 80 columns.

    Raises ConfigError if there is no run or no ledger, PlimsollError if a ledger line is wrong.
    """
    run = existing_run(path)
    failure = _failure(run)
    try:
        rows = read_ledger(run.ledger_path)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *failure])) from error
    counted_rows = drop_lone_nodes(rows)
    comparisons = compare(counted_rows)
    fullest = fullest_of_kinds(comparisons)
    remarks = [*_several(comparisons), nearest_text(*nearest_to_line(rows))]
    remarks += [f"Leak: {leak.text}." for leak in find_leaks(rows)]
    watched = [read_whole_run(run_read) for run_read in watch_runs([path])]
    write_whole(run.report_path, render_page(str(path), freeze_replies(watched, remarks), RUNS))
    last_line = f"Written to {run.report_path}."
    return "\n".join([*failure, table_text(fullest), "", *remarks, last_line])


def _failure(run: RunDirectory) -> list[str]:
    """Return lines about the failure of a run; empty if the run did not fail."""
    end = read_end(run.end_path)
    if end is None or end.how != "failed":
        return []
    return [f"The run {end}", f"Its log, with the traceback: {run.log_path}"]


def table_text(comparisons: Iterable[Comparison]) -> str:
    """Return a table of 80 columns with a line for each comparison."""
    return "\n".join(
        _FORMAT.format(*cells).rstrip() for cells in (_COLUMNS, *map(_cells, comparisons))
    )


def _cells(c: Comparison) -> tuple[str, ...]:
    """Return the cells of a comparison's table row; "" if the predicted value is unknown."""
    return (
        c.process,
        c.phase,
        c.measure,
        "" if c.predicted is None else gigabytes_text(c.predicted),
        gigabytes_text(c.measured),
        "" if c.over is None else f"{c.over:+.0%}",
        f"{c.seconds:.1f}",
    )


def _several(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Yield a remark if there are several processes of a kind: the table has only the fullest."""
    processes = {c.process for c in comparisons}
    if len({process_kind(process) for process in processes}) < len(processes):
        yield "Of several processes of a kind, the fullest of each phase; ledger.jsonl has all."


def nearest_text(who: LedgerRow, fullest: LedgerRow) -> str:
    """Return sentences about the card or node that was nearest to its capacity.

    `who` and `fullest` are the rows that `nearest_to_line` returns.
    """
    held, line = fullest.measured.fullest, fullest.line
    what = "node" if is_node(fullest) else "card"
    return (
        f"Nearest the line: {who.process} in {who.phase}, step {who.step}. The run held "
        f"{gigabytes_text(held)} of its {what}'s {gigabytes_text(line.capacity)} "
        f"({held / line.capacity:.0%}); {gigabytes_text(line.used)} were in use by all "
        "processes there."
    )
