"""The protocol of loggers, and the data that a logger gets about a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from plimsoll.run.responses import SampledResponse


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
