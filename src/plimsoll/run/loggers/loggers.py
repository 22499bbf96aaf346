"""All loggers of a run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from plimsoll.run.loggers.protocol import Logger, LoggerFailed
from plimsoll.run.responses import read_some

_RESPONSES = 8
"""Of a step, in a table."""

Say = Callable[[str], None]
"""Takes a line for people."""


class Loggers:
    """Loggers one after another. One that fails is told of, and left out from then on: the run's
    own files have everything.

    table_every: steps from one table of responses to the next.
    """

    def __init__(self, loggers: Iterable[Logger] = (), table_every: int = 1) -> None:
        self._loggers = list(loggers)
        self._table_every = table_every

    def scalars(self, step: int, values: Mapping[str, float], say: Say) -> None:
        """Have all keep numbers of a step."""
        self._each(lambda logger: logger.scalars(step, values), say)

    def responses(self, step: int, path: Path, say: Say) -> None:
        """Have those that take responses keep some of a step's, where it is one of the steps for
        that. path: of its trajectories."""
        due = step == 1 or step % self._table_every == 0
        if due and any(logger.has_tables for logger in self._loggers):
            rows = read_some(path, _RESPONSES)
            self._each(lambda logger: logger.responses(step, rows), say)

    def close(self, say: Say, *, failed: bool) -> None:
        """Have all send what is left. failed: whether the run ended with an error."""
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
