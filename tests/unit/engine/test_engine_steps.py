"""Optimizer steps that are counted, and how many in a row may be left out."""

from __future__ import annotations

import math

import pytest

from plimsoll.engine.steps import Steps, check_skipped
from plimsoll.errors import PlimsollError


def test_a_step_that_is_taken_ends_the_row_of_those_left_out() -> None:
    steps = Steps()
    for finite in (False, True, False, False):
        steps = steps.after(finite)
    assert steps == Steps(taken=1, skipped=3, in_a_row=2)


def test_one_more_in_a_row_than_asked_for_stops_the_run() -> None:
    check_skipped(math.nan, in_a_row=2, most=2)
    with pytest.raises(PlimsollError, match="norm is nan, not finite in 3 steps in a row: a loss"):
        check_skipped(math.nan, in_a_row=3, most=2)
    with pytest.raises(PlimsollError, match="norm is inf: a loss"):
        check_skipped(math.inf, in_a_row=1, most=0)
