"""The metric names of the run itself, and those that losses may have."""

from __future__ import annotations

import pytest

from plimsoll.algorithm.choice import is_run_metric

LOSSES = ("policy_loss", "preference_loss", "reward_loss", "feedback_loss")


@pytest.mark.parametrize("package", LOSSES)
@pytest.mark.parametrize(
    "name",
    ["step", "loss", "tokens", "seconds/score", "eval/own", "epoch", "epoch/chat", "learning_rate"],
)
def test_what_every_run_writes_is_taken_in_every_job(package: str, name: str) -> None:
    assert is_run_metric(package, name)


def test_a_name_is_taken_where_the_job_has_it_and_free_elsewhere() -> None:
    """`accuracy` is of the losses on pairs and of KTO's evaluation; `nll` also of a teacher."""
    taken = {
        name: [p for p in LOSSES if is_run_metric(p, name)] for name in ("accuracy", "kl", "nll")
    }
    assert taken == {
        "accuracy": ["feedback_loss"],
        "kl": ["policy_loss"],
        "nll": ["policy_loss", "preference_loss"],
    }
    assert not any(is_run_metric(package, "epochs") for package in LOSSES)
    assert not any(is_run_metric(package, "own/loss") for package in LOSSES)
