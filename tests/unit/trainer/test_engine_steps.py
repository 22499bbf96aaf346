"""Optimizer steps that are counted, and how many in a row may be left out."""

from __future__ import annotations

import math
import re

from plimsoll.trainer.protocol import Steps, not_finite_error


def test_a_step_that_is_taken_ends_the_row_of_those_left_out() -> None:
    steps = Steps()
    for finite in (False, True, False, False):
        steps = steps.after(finite)
    assert steps == Steps(taken=1, skipped=3, in_a_row=2)


def test_a_run_that_ends_by_a_wrong_gradient_shows_the_loss_and_how_often() -> None:
    """A gradient may be infinite where the loss is not, and which it was says where to look."""
    error = not_finite_error(math.nan, math.nan, in_a_row=3)
    assert re.search(r"norm is nan\b.* 3 steps in a row.* loss nan\b", str(error))
    assert re.search(r"norm is inf\b.* loss 0\.5\b", str(not_finite_error(math.inf, 0.5, 1)))
