"""Other places that metrics are sent to: TensorBoard, W&B, MLflow, Trackio.

The loggers that a config names are opened, and used as one object. Each raises errors of its own
kind. The package of a logger is imported as the logger is opened.
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
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from plimsoll.config.load import leaves
from plimsoll.config.run import LoggerName, RunConfig
from plimsoll.errors import ConfigError, PlimsollError
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
        """Keep the numbers of a step.

        Numbers may be NaN, and a resumed run may send a step again.
        """

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Keep some sampled responses of a step as a table."""

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet, and end the run, as failed if `failed`."""


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
            except PlimsollError:
                raise
            except Exception as error:  # noqa: BLE001  every logger raises its own errors
                self._loggers.remove(logger)
                say(
                    f"warning: {logger.name} keeps nothing any more, and the run goes on without "
                    f"it: {type(error).__name__}: {error}. The run directory has all; resuming "
                    "the run starts it again."
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
    try:
        return _LOGGERS[name](config.logger_project, directory.path, settings, identity)
    except Exception as error:  # every logger raises its own errors
        again = f", or {identity} out of {directory.loggers_path} to begin a new one"
        raise ConfigError(
            f"run.loggers: {name} cannot be opened: {type(error).__name__}: {error}. Correct what "
            f"it says, or leave {name} out of run.loggers{again if identity else ''}."
        ) from error


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


class WandbLogger:
    """A run of W&B; its environment variables (WANDB_MODE, WANDB_ENTITY) apply.

    The x axis of curves is Plimsoll's step, not W&B's own: W&B's refuses steps that a resumed run
    sends again.
    """

    name = "W&B"
    has_tables = True

    def __init__(
        self, project: str, directory: Path, settings: Mapping[str, Any], identity: str | None
    ) -> None:
        import wandb

        self._table = wandb.Table
        self.identity = identity or uuid4().hex[:8]
        self._run: Any = wandb.init(
            project=project,
            name=directory.resolve().name,
            id=self.identity,
            resume="allow",
            dir=str(directory),
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        self._run.log({"step": step, **values})

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses."""
        columns, data = table_of(step, rows)
        self._run.log({"step": step, "responses": self._table(columns=columns, data=data)})

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet, and end the run, as failed if `failed`."""
        self._run.finish(exit_code=int(failed))


class TrackioLogger:
    """A run of Trackio; its environment variables (TRACKIO_DIR, TRACKIO_SPACE_ID) apply.

    The run's name, unique in the project, is its identity.
    """

    name = "Trackio"
    has_tables = True

    def __init__(
        self, project: str, directory: Path, settings: Mapping[str, Any], identity: str | None
    ) -> None:
        import trackio

        self._table = trackio.Table
        self.identity = identity or f"{directory.resolve().name}-{uuid4().hex[:8]}"
        self._run: Any = trackio.init(
            project=project,
            name=self.identity,
            resume="allow",
            config=dict(settings),
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        self._run.log(dict(values), step=step)

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses."""
        columns, data = table_of(step, rows)
        self._run.log({"responses": self._table(columns=columns, data=data)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet, and end the run."""
        self._run.finish()


_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1000, 100, 6000
"""Limits above which MLflow refuses a request (mlflow/utils/validation.py)."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowLogger:
    """A run of MLflow; its environment variable MLFLOW_TRACKING_URI (the address) applies.

    MLflow's params cannot change, so they are the settings when the run began. The artifact
    config.yaml has the current settings.
    """

    name = "MLflow"
    has_tables = True

    def __init__(
        self, project: str, directory: Path, settings: Mapping[str, Any], identity: str | None
    ) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self.identity = identity or self._begin(project, directory.resolve().name, settings)
        self._client.update_run(self.identity, status="RUNNING")
        self._client.log_dict(self.identity, dict(settings), "config.yaml")

    def _begin(self, project: str, name: str, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(project)
        number = (
            self._client.create_experiment(project)
            if experiment is None
            else experiment.experiment_id
        )
        identity: str = self._client.create_run(number, run_name=name).info.run_id
        params = [
            Param(_NOT_IN_NAMES.sub("_", ".".join(path)), str(value)[:_LONGEST_PARAM])
            for path, value in leaves(settings).items()
        ]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(identity, params=params[start : start + _PARAMS_AT_ONCE])
        return identity

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in values.items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            batch = metrics[start : start + _METRICS_AT_ONCE]
            self._client.log_batch(self.identity, metrics=batch)

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses as a new file per step.

        MLflow would send all rows of a growing table again at each step.
        """
        columns, data = table_of(step, rows)
        content = {name: [row[i] for row in data] for i, name in enumerate(columns)}
        self._client.log_table(self.identity, content, f"responses/step-{step:06d}.json")

    def close(self, *, failed: bool) -> None:
        """Mark the run as ended; a resumed run is marked as running again."""
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


_LOGGERS: Mapping[str, Callable[[str, Path, Mapping[str, Any], str | None], Logger]] = {
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
    "mlflow": MlflowLogger,
}
