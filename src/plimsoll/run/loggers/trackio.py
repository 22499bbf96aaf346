"""Logger to Trackio; its environment variables (TRACKIO_DIR, TRACKIO_SPACE_ID) apply."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import trackio

from plimsoll.run.loggers.open import About, failing, table_of
from plimsoll.run.responses import SampledResponse

_FAILURES = (OSError, sqlite3.Error, ValueError, RuntimeError)


class TrackioLogger:
    """A run of Trackio. Its name, unique in the project, is its identity."""

    name = "Trackio"
    has_tables = True

    def __init__(self, about: About) -> None:
        self.identity = about.identity or f"{about.name}-{uuid4().hex[:8]}"
        with failing(*_FAILURES):
            self._run: Any = trackio.init(
                project=about.project,
                name=self.identity,
                resume="allow",
                config=dict(about.settings),
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        with failing(*_FAILURES):
            self._run.log(dict(values), step=step)

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses."""
        columns, data = table_of(step, rows)
        with failing(*_FAILURES):
            self._run.log({"responses": trackio.Table(columns=columns, data=data)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet, and end the run."""
        with failing(*_FAILURES):
            self._run.finish()
