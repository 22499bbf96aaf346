"""Logger to Weights & Biases; its environment variables (WANDB_MODE, WANDB_ENTITY) apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import wandb

from plimsoll.run.loggers.open import About, failing, table_of
from plimsoll.run.responses import SampledResponse

_FAILURES = (wandb.errors.Error, OSError)


class WandbLogger:
    """A run of W&B.

    The x axis of curves is Plimsoll's step, not W&B's own: W&B's refuses steps that a resumed run
    sends again.
    """

    name = "W&B"
    has_tables = True

    def __init__(self, about: About) -> None:
        self.identity = about.identity or uuid4().hex[:8]
        with failing(*_FAILURES):
            self._run: Any = wandb.init(
                project=about.project,
                name=about.name,
                id=self.identity,
                resume="allow",
                dir=str(about.directory),
                config=dict(about.settings),
                allow_val_change=True,
                settings=wandb.Settings(console="off"),
            )
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        with failing(*_FAILURES):
            self._run.log({"step": step, **values})

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses."""
        columns, data = table_of(step, rows)
        with failing(*_FAILURES):
            self._run.log({"step": step, "responses": wandb.Table(columns=columns, data=data)})

    def close(self, *, failed: bool) -> None:
        """Send all data that is not sent yet, and end the run, as failed if `failed`."""
        with failing(*_FAILURES):
            self._run.finish(exit_code=int(failed))
