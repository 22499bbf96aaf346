"""Show runs and plans on pages.

`plimsoll report RUN` writes a page of a run, `plimsoll watch RUN...` serves one live.

A report has a run's results and memory as one HTML file, and as text. The end of a run writes the
file, too. A live page shows runs, or all runs below a directory. A thread reads the files that the
runs write. Requests are answered from the data read so far.

`plimsoll plan CONFIG --open` shows the memory plan as a page on which users can try settings. Each
change is a request, and the server plans again from the current config file. No file is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pyarrow import ArrowException

from plimsoll.commands.planning import advise_job, plan_job
from plimsoll.config.flags import Flag, parse_flags, write_flags
from plimsoll.config.load import read_config_text
from plimsoll.config.secrets import mask_secrets
from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.machine.guard import require_server
from plimsoll.memory.weigh import Plan
from plimsoll.page.answers import answer, freeze_replies
from plimsoll.page.ledger import (
    Comparison,
    compare,
    drop_lone_nodes,
    fullest_of_kinds,
    nearest_to_line,
)
from plimsoll.page.plan import (
    controls,
    describe_advice,
    describe_plan,
    flags_from,
    merge_flags,
    peaks,
)
from plimsoll.page.progress import phase_seconds, prometheus_text
from plimsoll.page.serve import PLAN, RUNS, AnswerFunction, Query, read_token, render_page, serve
from plimsoll.page.watched import Watched, read_whole_run, watch_runs
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory, existing_run, refuse_strange_files
from plimsoll.run.ending import read_end
from plimsoll.run.files import write_whole
from plimsoll.run.ledger import LedgerRow, is_node, process_kind, read_leaks, read_ledger
from plimsoll.run.numbers import gigabytes_text

_COLUMNS = ("process", "phase", "memory", "predicted", "measured", "over", "seconds")
_FORMAT = "{:<14} {:<13} {:<9} {:>9} {:>9} {:>7} {:>9}"


def report_run(path: Path) -> str:
    """Write RUN/report.html, and return its part about memory as text of 80 columns.

    Raises ConfigError if there is no run or no ledger, PlimsollError if a ledger line is wrong.
    """
    run, failure = existing_run(path), list[str]()
    end = read_end(run.end_path)
    if end is not None and end.how == "failed":
        failure = [f"The run {end}", f"Its log, with the traceback: {run.log_path}"]
    [watched] = map(read_whole_run, watch_runs([path]))
    rows, seconds = watched.ledger.rows, phase_seconds(watched)
    if not rows:
        try:
            read_ledger(run.ledger_path)  # says why there are none
        except ConfigError as error:
            raise ConfigError("\n".join([str(error), *failure])) from error
    # The metrics have the seconds of all steps; a last save is in the ledger alone.
    comparisons = [
        replace(c, seconds=max(c.seconds, seconds.get(c.phase, 0.0)))
        for c in compare(drop_lone_nodes(rows))
    ]
    processes = {c.process for c in comparisons}
    remarks = [nearest_text(*nearest_to_line(rows))]
    if len(set(map(process_kind, processes))) < len(processes):
        several = "Of several processes of a kind, the fullest of each phase; ledger.jsonl has all."
        remarks.insert(0, several)
    remarks += [f"Leak: {leak.text}." for leak in read_leaks(run.leaks_path)]
    write_whole(run.report_path, render_page(str(path), freeze_replies([watched], remarks), RUNS))
    last_line = f"Written to {run.report_path}."
    table = table_text(fullest_of_kinds(comparisons))
    return "\n".join([*failure, table, "", *remarks, last_line])


def table_text(comparisons: Iterable[Comparison]) -> str:
    """Return a table of 80 columns with a line for each comparison."""
    lines = [_FORMAT.format(*_COLUMNS)]
    for c in comparisons:
        predicted = "" if c.predicted is None else gigabytes_text(c.predicted)
        over = "" if c.over is None else f"{c.over:+.0%}"
        sizes = (predicted, gigabytes_text(c.measured), over)
        lines.append(_FORMAT.format(c.process, c.phase, c.measure, *sizes, f"{c.seconds:.1f}"))
    return "\n".join(line.rstrip() for line in lines)


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


def open_plan(path: str, flags: Sequence[str], host: str, port: int) -> None:
    """Serve the page of a config's plan until the process is interrupted.

    Raises ConfigError or SettingsConflict if the config cannot be loaded, and ConfigError if the
    address cannot be used.
    """
    require_server(" `plimsoll plan --html` writes a file without it.")
    load_any(path, flags)
    text = render_page(f"plan of {path}", None, PLAN)
    serve(text, lambda name, query: answer_plan(path, flags, name, query), host, port)


def plan_html(path: str, flags: Sequence[str], plan: Plan) -> str:
    """Return the text of one HTML file that shows a plan, without settings to change."""
    values = {
        "config": path,
        "job": plan.job.spec.job.name,
        "controls": [],
        "before": None,
        "refusal": None,
        "plan": describe_plan(plan),
        "copies": _copies(path, parse_flags(flags)),
    }
    return render_page(f"plan of {path}", {"plan": values}, PLAN)


def answer_plan(path: str, flags: Sequence[str], name: str, query: Query) -> dict[str, Any]:
    """Return the JSON values for a request of the page: a plan, or changes that would fit.

    Args:
        path: The config.
        flags: The flags of the command.
        name: The request: "plan" or "fits".
        query: The text of each key that the user changed on the page.

    Raises the errors of `load_any` if the config itself is wrong, and ConfigError for another name.
    """
    if name == "plan":
        return _plan_with_changes(path, flags, query)
    if name != "fits":
        raise ConfigError(f"There is no {name!r}. There are: plan, fits.")
    changed = _changed_flags(load_any(path, flags), flags, query)
    return describe_advice(advise_job(load_any(path, _words(changed))))


def _plan_with_changes(path: str, flags: Sequence[str], query: Query) -> dict[str, Any]:
    """Return values of the plan with the user's changes, and a summary of the plan without them.

    If the changes are refused, "plan" is None and "refusal" has the reason.
    """
    spec = load_any(path, flags)
    values: dict[str, Any] = {
        "config": path,
        "job": spec.job.name,
        "controls": [asdict(control) for control in controls(spec, query)],
    }
    try:
        changed = _changed_flags(spec, flags, query)
        plan = plan_job(load_any(path, _words(changed)))
    except PlimsollError as error:
        return values | {"before": _before(spec), "refusal": str(error), "plan": None, "copies": []}
    return values | {
        "before": _before(spec) if query else _summary(plan),
        "refusal": None,
        "plan": describe_plan(plan),
        "copies": _copies(path, changed),
    }


def _changed_flags(spec: RunSpec[Any], flags: Sequence[str], query: Query) -> tuple[Flag, ...]:
    """Return the flags of the command, with the user's changes replacing or following them."""
    return merge_flags(parse_flags(flags), flags_from(spec, query))


def _before(spec: RunSpec[Any]) -> dict[str, Any] | None:
    try:
        return _summary(plan_job(spec))
    except PlimsollError:
        return None


def _summary(plan: Plan) -> dict[str, Any]:
    return {"verdict": plan.verdict, "peaks": peaks(plan)}


def _words(flags: Sequence[Flag]) -> list[str]:
    return [f"{flag.name}={write_value(flag.value)}" for flag in flags]


def _copies(path: str, flags: Sequence[Flag]) -> list[dict[str, str]]:
    """Return texts to copy, with titles: the config with the flags in it, then the command.

    If the config file cannot be edited, there is only the command. Both are without secrets.
    """
    command = mask_secrets(shlex.join(["plimsoll", "plan", path, *_words(flags)]))
    copies = [{"title": "The command with these settings", "text": command}]
    try:
        text = mask_secrets(write_flags(read_config_text(path), path, flags))
    except ConfigError:
        return copies
    return [{"title": "The config with these settings", "text": text}, *copies]
