"""What a logger is, and what it is given of a run."""

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
    """Id by which the logger knows the run; empty if it needs none."""
    has_tables: bool
    """Whether it takes responses."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers of a step, sent again or NaN as they may be, or raise LoggerFailed."""

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Keep some sampled responses of a step as a table, or raise LoggerFailed."""

    def close(self, *, failed: bool) -> None:
        """Send what is left of a run that may have failed, or raise LoggerFailed."""


class LoggerFailed(Exception):
    """Error of a logger that could not keep something; the run does not depend on it."""


@dataclass(frozen=True)
class About:
    """What a logger is given of a run."""

    project: str
    """Project that the run is filed under."""
    name: str
    """Name of the run."""
    directory: Path
    """Directory for the logger's own files."""
    settings: Mapping[str, Any]
    """The resolved config."""
    identity: str | None
    """Identity of a run that resumes; None for a new one."""


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds inside the block into LoggerFailed."""
    try:
        yield
    except kinds as error:
        raise LoggerFailed(f"{type(error).__name__}: {error}") from error


def table_of(step: int, rows: Sequence[SampledResponse]) -> tuple[list[str], list[list[Any]]]:
    """Return responses as columns and rows; a reward part that a response lacks is None."""
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
