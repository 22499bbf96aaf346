"""Count the steps that are left out because a number of theirs is not finite, and bound them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.errors import PlimsollError
from plimsoll.records import Sample
from plimsoll.run.files import whole_file

BAD_STEPS = "bad_steps"
"""The metric that is 1 in a step that was left out, wholly or in one of its updates."""


class BadNumbers(PlimsollError):
    """Numbers that are not finite, from which a step must not learn.

    Attributes:
        figures: What is not finite and where, such as `the reward of group 3`.
    """

    def __init__(self, figures: Sequence[str]) -> None:
        super().__init__(list(figures))  # the argument, so that the exception pickles
        self.figures = figures

    def __str__(self) -> str:
        return f"not finite: {'; '.join(self.figures)}"


def write_sequences(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write the sequences that a step of a job on rows would have learned from, in their order."""
    table = pa.table(
        {
            "step": pa.array([step] * len(samples), pa.int64()),
            "sequence": pa.array(range(len(samples)), pa.int64()),
            "tokens": pa.array([s.tokens.astype(np.int64) for s in samples], pa.list_(pa.int64())),
            "loss_mask": pa.array([s.loss_mask for s in samples], pa.list_(pa.bool_())),
        }
    )
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


class BadSteps:
    """The bad steps of this part of a run.

    Attributes:
        most: How many may follow one another; see `run.max_bad_steps`.
        in_a_row: How many of the last steps were bad.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0

    def add(self, step: int, figures: Sequence[str], dump: Path) -> str:
        """Count a bad step, and return the note on it.

        Raises PlimsollError if there were too many in a row.

        Args:
            step: the step.
            figures: what is not finite, and where.
            dump: the file with what the step would have learned from.
        """
        self.in_a_row += 1
        what = f"step {step} has numbers that are not finite: {'; '.join(figures)}"
        if self.in_a_row <= self.most:
            return f"{what}. The weights stay as they were. What it would have learned: {dump}"
        row = "" if self.in_a_row == 1 else f", the {self.in_a_row}th bad step in a row"
        raise PlimsollError(
            f"{what}{row}. run.max_bad_steps allows {self.most} in a row. The weights were left as "
            f"they were, and earlier checkpoints are whole. What the step would have learned is in "
            f"{dump} (`plimsoll rollouts RUN --bad`). If a reward or a log-prob of the sampler is "
            "not finite, mend where it comes from. If a loss or a gradient is, look at what the "
            "loss is computed from (a loss or an advantage of your own); where it grew in the "
            "steps before (metrics.jsonl), lower the learning rate"
        )

    def end_step(self, bad: bool) -> None:
        """Begin the count anew after a step that was not bad."""
        if not bad:
            self.in_a_row = 0
