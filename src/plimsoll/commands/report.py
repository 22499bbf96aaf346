"""Show runs on a page: `plimsoll report RUN` writes one, `plimsoll watch RUN...` serves one live.

A report has a run's results and memory as one HTML file, and as text. The end of a run writes the
file, too. A live page shows runs, or all runs below a directory. A thread reads the files that the
runs write. Requests are answered from the data read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pyarrow import ArrowException

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.guard import require_server
from plimsoll.page.answers import answer, freeze_replies
from plimsoll.page.ledger import (
    Comparison,
    compare,
    drop_lone_nodes,
    fullest_of_kinds,
    nearest_to_line,
    process_kind,
)
from plimsoll.page.progress import prometheus_text
from plimsoll.page.serve import RUNS, AnswerFunction, Query, read_token, render_page, serve
from plimsoll.page.watched import Watched, read_whole_run, watch_runs
from plimsoll.run.directory import RunDirectory, existing_run, refuse_strange_files
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


_EVERY = 0.25
"""Seconds between two reads if there was no new data."""


def watch(paths: Sequence[Path], host: str, port: int, token_file: Path | None = None) -> None:
    """Serve the page of runs until the process is interrupted.

    `token_file` holds the token of its address; default: a new token.

    Raises ConfigError if a path holds no run or the page cannot be served.
    """
    require_server(" `plimsoll report` writes a file without it.")
    runs = watch_runs([run for path in paths for run in find_runs(path)])
    text = render_page(", ".join(run.name for run in runs), None, RUNS)
    token = None if token_file is None else read_token(token_file)
    with Reader(runs) as reader:
        serve(
            text,
            answer_with(lambda: reader.runs),
            host,
            port,
            figures=lambda: prometheus_text(reader.runs),
            token=token,
        )


def answer_with(runs: Callable[[], Sequence[Watched]]) -> AnswerFunction:
    """Return a function that answers the page's requests. `runs` returns the current runs."""

    def answer_request(name: str, query: Query) -> Any:
        try:
            for run in runs():
                refuse_strange_files(run.run.path)
            return answer(runs(), name, query)
        except ArrowException as error:
            raise PlimsollError(str(error)) from error

    return answer_request


def find_runs(path: Path) -> list[Path]:
    """Return the directory if it is a run's, or else the runs in it and in its subdirectories.

    Raises ConfigError if there is none.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no directory. Give the run.directory of a run that has begun."
        )
    if _holds_run(path):
        return [path]
    runs = sorted(filter(_holds_run, (*path.glob("*"), *path.glob("*/*"))))
    if not runs:
        raise ConfigError(
            f"{path} holds no run: neither it nor its subdirectories have a config.yaml, which a "
            f"run writes when it begins. Give the run.directory of a run, or a directory of runs."
        )
    return runs


def _holds_run(path: Path) -> bool:
    run = RunDirectory(path)
    return run.config_path.is_file() or run.metrics_path.is_file()


class Reader:
    """A context manager in which a thread reads the files of runs and updates `runs`.

    The thread reads four times a second, and again at once after new data. It ends with the block.
    """

    def __init__(self, runs: tuple[Watched, ...]) -> None:
        self.runs = runs
        self._stop = Event()
        self._thread = Thread(target=self._read, name="reader", daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stop.is_set():
            before = self.runs
            self.runs = tuple(run.look() for run in before)
            grown = [run.version for run in before] != [run.version for run in self.runs]
            self._stop.wait(0.0 if grown else _EVERY)
