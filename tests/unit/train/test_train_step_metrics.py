"""The metrics of a step: sums over the ranks, and whether it was skipped."""

from __future__ import annotations

import math

import pytest

from plimsoll.train.session import mean_metrics, step_metrics
from plimsoll.trainer.worker import UpdateResult


@pytest.mark.parametrize(("norm", "left_out"), [(0.5, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_a_step_that_was_left_out_is_counted(norm: float, left_out: float) -> None:
    ranks = [UpdateResult({"loss": 0.25}, norm), UpdateResult({"loss": 0.5}, norm)]
    metrics = step_metrics(ranks, rate=0.1)
    assert metrics["skipped_steps"] == left_out
    assert (metrics["loss"], metrics["learning_rate"]) == (0.75, 0.1)


def test_a_metric_that_not_every_rank_or_update_has_is_neither_lost_nor_an_error() -> None:
    """A user's own loss may report something for some micro-batches only."""
    first = [UpdateResult({"loss": 0.25}, 1.0), UpdateResult({"loss": 0.5, "rare": 0.25}, 1.0)]
    second = [UpdateResult({"loss": 0.25}, 1.0), UpdateResult({"loss": 0.5}, 1.0)]
    assert step_metrics(first, rate=0.1)["rare"] == 0.25
    assert mean_metrics([second, first])["rare"] == 0.25
