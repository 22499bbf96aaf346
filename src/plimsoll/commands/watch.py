"""`plimsoll watch RUN...`: serve a live page of runs, or of all runs below a directory.

`plimsoll watch runs/ppo runs/grpo`

A thread reads the files that the runs write. Requests are answered from the data read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pyarrow import ArrowException

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.guard import require_server
from plimsoll.page.answers import answer
from plimsoll.page.html import RUNS, render_page
from plimsoll.page.progress import prometheus_text
from plimsoll.page.serve import AnswerFunction, Query, read_token, serve
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.run.directory import RunDirectory, refuse_strange_files

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
