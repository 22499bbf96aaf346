"""What a logger is, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from plimsoll.run.responses import SampledResponse


class Logger(Protocol):
    """A place that keeps metrics. name: for people. identity: what it knows the run by; "" where it
    needs nothing. has_tables: whether it takes responses."""

    name: str
    identity: str
    has_tables: bool

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers of a step, which may have come before, and may be NaN.

        Raises LoggerFailed where they cannot be kept.
        """

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Keep some sampled responses of a step as a table. Raises LoggerFailed."""

    def close(self, *, failed: bool) -> None:
        """Send what is left. failed: whether the run ended with an error. Raises LoggerFailed."""


class LoggerFailed(Exception):
    """A logger could not keep something; the run does not need it."""


@dataclass(frozen=True)
class About:
    """What a logger is told of a run. project: what it files the run under. name: of the run, for
    people. directory: for files of the logger's own. settings: the resolved config. known: what the
    logger knew the run by, of one that goes on; else None."""

    project: str
    name: str
    directory: Path
    settings: Mapping[str, Any]
    known: str | None


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """Within: errors of these kinds become LoggerFailed."""
    try:
        yield
    except kinds as error:
        raise LoggerFailed(f"{type(error).__name__}: {error}") from error


def table_of(step: int, rows: Sequence[SampledResponse]) -> tuple[list[str], list[list[Any]]]:
    """Responses as columns and rows; a part that a response has not is None."""
    parts = list(dict.fromkeys(name for row in rows for name in row.parts))
    columns = [
        *("step", "group", "sample", "prompt", "response", "reference"),
        *("reward", "advantage", "tokens", "cut_off", *(f"reward_{name}" for name in parts)),
    ]
    return columns, [
        [
            *(step, one.group, one.sample_index, one.prompt, one.response, one.reference),
            *(one.reward, one.advantage, one.tokens, one.cut_off, *map(one.parts.get, parts)),
        ]
        for one in rows
    ]
