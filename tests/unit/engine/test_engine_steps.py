"""Optimizer steps that are counted, and how many in a row may be left out."""

from __future__ import annotations

import math

from plimsoll.engine.protocol import Steps, not_finite_error


def test_a_step_that_is_taken_ends_the_row_of_those_left_out() -> None:
    steps = Steps()
    for finite in (False, True, False, False):
        steps = steps.after(finite)
    assert steps == Steps(taken=1, skipped=3, in_a_row=2)


def test_what_ended_a_run_is_told_with_the_loss_and_how_often() -> None:
    """A gradient may be infinite where the loss is not, and which it was says where to look."""
    told = str(not_finite_error(math.nan, math.nan, in_a_row=3))
    share = "and this rank's share of the loss"
    assert f"norm is nan, not finite in 3 steps in a row, {share} nan. " in told
    assert f"norm is inf, {share} 0.5. " in str(not_finite_error(math.inf, 0.5, 1))
