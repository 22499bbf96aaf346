"""Optimizer steps: how many were taken, and how many were left out."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.errors import PlimsollError


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a role so far.

    taken: those that changed the weights. skipped: those whose gradient was not finite.
    in_a_row: how many of these came last, one after the other.
    """

    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def after(self, finite: bool) -> Steps:
        """The count after one more step."""
        if finite:
            return Steps(self.taken + 1, self.skipped)
        return Steps(self.taken, self.skipped + 1, self.in_a_row + 1)


def not_finite(norm: float, loss: float, in_a_row: int) -> PlimsollError:
    """What ends a run whose gradient norm is not finite. loss: this rank's share of the step's.
    in_a_row: how many steps have been so, one after the other."""
    times = "" if in_a_row == 1 else f", not finite in {in_a_row} steps in a row"
    return PlimsollError(
        f"the gradient norm is {norm}{times}, and this rank's share of the loss {loss:.4g}. The "
        "weights were left as they were, and earlier checkpoints are whole. Where a share is not "
        "finite, look at what the loss is computed from (a loss, an advantage or a reward of your "
        "own); where it grew in the steps before (metrics.jsonl), or is finite, lower the learning "
        "rate. optimizer.max_skipped_steps lets so many such steps in a row be left out"
    )
