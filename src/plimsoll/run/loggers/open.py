"""Define the protocol of loggers, open those that a config names, and use all as one object.

TensorBoard's event files are written here. Other loggers are modules beside this one, by name.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from plimsoll.config.run import LoggerName, RunConfig
from plimsoll.errors import ConfigError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.json_lines import document
from plimsoll.run.responses import SampledResponse, read_some


class Logger(Protocol):
    """A place that keeps metrics."""

    name: str
    """Name for messages."""
    identity: str
    """The logger's id of the run; empty if the logger needs none."""
    has_tables: bool
    """Whether the logger keeps tables of responses."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of a step, or raise LoggerFailed.

        Numbers may be NaN, and a resumed run may send a step again.
        """

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Keep some sampled responses of a step as a table, or raise LoggerFailed."""

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet and end the run, or raise LoggerFailed."""


class LoggerFailed(Exception):
    """Error of a logger that could not keep data; the run goes on without the logger."""


@dataclass(frozen=True)
class About:
    """The data that a logger gets about a run."""

    project: str
    """Project that the run is filed under."""
    name: str
    """Name of the run."""
    directory: Path
    """Directory for the logger's own files."""
    settings: Mapping[str, Any]
    """The resolved config."""
    identity: str | None
    """The logger's id of a run that resumes; None for a new run."""


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds inside the block into LoggerFailed."""
    try:
        yield
    except kinds as error:
        raise LoggerFailed(f"{type(error).__name__}: {error}") from error


def table_of(step: int, rows: Sequence[SampledResponse]) -> tuple[list[str], list[list[Any]]]:
    """Return a table of responses: column names, and rows of values.

    The value is None for a reward part that a response does not have.
    """
    parts = list(dict.fromkeys(name for row in rows for name in row.parts))
    columns = [
        *("step", "group", "sample", "prompt", "response", "reference"),
        *("reward", "advantage", "tokens", "cut_off", *(f"reward_{name}" for name in parts)),
    ]
    return columns, [
        [
            *(step, r.group, r.sample_index, r.prompt, r.response, r.reference),
            *(r.reward, r.advantage, r.tokens, r.cut_off, *map(r.parts.get, parts)),
        ]
        for r in rows
    ]


_RESPONSES = 8
"""Number of responses of a step in a table."""

Say = Callable[[str], None]
"""Takes a line to show."""


class Loggers:
    """Passes metrics on to several loggers.

    A logger that fails is reported and not used any more, as the run's own files have everything.
    `table_every` is the number of steps from one table of responses to the next.
    """

    def __init__(self, loggers: Iterable[Logger] = (), table_every: int = 1) -> None:
        self._loggers = list(loggers)
        self._table_every = table_every

    def scalars(self, step: int, values: Mapping[str, float], say: Say) -> None:
        """Send the numbers of a step to all loggers."""
        self._each(lambda logger: logger.scalars(step, values), say)

    def responses(self, step: int, path: Path, say: Say) -> None:
        """Send some responses of a step's file to loggers with tables, if a table is due."""
        due = step == 1 or step % self._table_every == 0
        if due and any(logger.has_tables for logger in self._loggers):
            rows = read_some(path, _RESPONSES)
            self._each(lambda logger: logger.responses(step, rows), say)

    def close(self, say: Say, *, failed: bool) -> None:
        """Close all loggers. `failed` says whether the run ended with an error."""
        self._each(lambda logger: logger.close(failed=failed), say)

    def _each(self, act: Callable[[Logger], None], say: Say) -> None:
        for logger in tuple(self._loggers):
            try:
                act(logger)
            except LoggerFailed as error:
                self._loggers.remove(logger)
                say(
                    f"warning: {logger.name} keeps nothing any more, and the run goes on without "
                    f"it: {error}. The run directory has all; resuming the run starts it again."
                )


_TABLES = 100
"""Maximum number of tables of responses in a run."""

_EPOCHS_TABLE = 10
"""Steps between two tables of a run whose length is given in epochs."""


@contextmanager
def open_loggers(
    config: RunConfig, directory: RunDirectory, settings: Mapping[str, Any], first_step: int
) -> Iterator[Loggers]:
    """Yield the loggers of a config; they take metrics inside the block.

    The end of the block closes them. Each logger's id of the run is kept in loggers.json, for a
    run that resumes. `settings` is the resolved config, `first_step` the next step of the run.

    Raises ConfigError if a logger cannot be opened.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(TensorBoardLogger(directory.tensorboard_path, first_step))
    identities = _read_identities(directory)
    for name in dict.fromkeys(config.loggers):
        if name != "tensorboard":
            logger = _open_logger(name, config, directory, settings, identities.get(name))
            identities[name] = logger.identity
            write_whole(directory.loggers_path, document(identities))
            loggers.append(logger)
    opened = Loggers(loggers, table_every=_table_every(config))
    failed = True
    try:
        yield opened
        failed = False
    finally:
        opened.close(lambda line: print(line, file=sys.stderr), failed=failed)


def _read_identities(directory: RunDirectory) -> dict[str, str]:
    path = directory.loggers_path
    if not path.is_file():
        return {}
    try:
        identities = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). Remove it to have the loggers begin a new run."
        ) from error
    return {str(name): str(identity) for name, identity in identities.items()}


def _open_logger(
    name: LoggerName,
    config: RunConfig,
    directory: RunDirectory,
    settings: Mapping[str, Any],
    identity: str | None,
) -> Logger:
    path = directory.path
    about = About(config.logger_project, path.resolve().name, path, settings, identity)
    try:
        logger: Logger = _load(name)(about)
    except LoggerFailed as error:
        again = (
            f", or {identity} out of {directory.loggers_path} to begin a new one"
            if identity
            else ""
        )
        raise ConfigError(
            f"run.loggers: {name} cannot be opened: {error}. Correct what it says, or leave {name} "
            f"out of run.loggers{again}."
        ) from error
    return logger


def _load(name: LoggerName) -> type[Any]:
    """Import a logger's module and package, and return the logger's class."""
    module = import_module(f"plimsoll.run.loggers.{name}")
    kind: type[Any] = getattr(module, f"{name.capitalize()}Logger")
    return kind


def _table_every(config: RunConfig) -> int:
    """Return the number of steps between two tables; a fixed number if `run.steps` is not set."""
    return _EPOCHS_TABLE if config.steps is None else -(-config.steps // _TABLES)


_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")


class TensorBoardLogger:
    """Writes scalars to an event file, at once for each step.

    TensorBoard's own writer is not used: if the disk is full, its thread ends with a traceback, one
    step late. A resumed run writes a new file in the same directory. TensorBoard ignores steps from
    `first_step` on in earlier files, so it shows each step once.
    """

    name = "TensorBoard"
    identity = ""
    has_tables = False

    def __init__(self, directory: Path, first_step: int = 1) -> None:
        now = time.time()
        # TensorBoard reads files in the order of their names, which begin with the time. So a new
        # name must be later than the old names, even if the clock went back.
        matches = (_NAME.match(path.name) for path in directory.glob("*"))
        begun = max([now, *(float(match[1]) + 1e-6 for match in matches if match)])
        name = f"events.out.tfevents.{begun:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        start = SessionLog(status=SessionLog.START)
        head = Event(wall_time=now, file_version="brain.Event:2")
        begin = Event(wall_time=now, step=first_step, session_log=start)
        write_whole(self._path, _record(head) + _record(begin))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step, or raise PlimsollError if the disk is full."""
        summaries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=summaries))
        append_whole(self._path, _record(event))

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self, *, failed: bool) -> None:
        """Do nothing: everything is written."""


def _record(event: Event) -> bytes:
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
