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


def check_skipped(norm: float, in_a_row: int, most: int) -> None:
    """Let a step with this gradient norm be left out, or not.

    Raises:
        PlimsollError: too many were, one after the other.
    """
    if in_a_row > most:
        times = "" if most == 0 else f", not finite in {in_a_row} steps in a row"
        raise PlimsollError(
            f"the gradient norm is {norm}{times}: a loss, a reward or an activation of this step "
            "is not finite. The weights were left as they were, and earlier checkpoints are "
            "whole. Look at the step's trajectories and metrics, lower the learning rate, or "
            "resume from the last checkpoint with another one. optimizer.max_skipped_steps lets "
            "so many such steps in a row be left out"
        )
