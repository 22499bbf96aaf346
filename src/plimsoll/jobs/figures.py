"""Metrics that evaluations of several jobs report."""

from __future__ import annotations

from plimsoll.config.run import Goal
from plimsoll.spec.job import Names


def with_interval(name: str, goal: Goal | None) -> Names:
    """Return a metric and the ends of its confidence interval."""
    return {name: goal, f"{name}_low": goal, f"{name}_high": goal}


ACCURACY = with_interval("accuracy", "highest")
PAIR_METRICS: Names = {
    "loss": "lowest",
    **ACCURACY,
    "rewards/margin": "highest",
    "rewards/chosen": None,
    "rewards/rejected": None,
}
