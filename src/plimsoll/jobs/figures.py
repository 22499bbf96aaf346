"""What the evaluations of several jobs report."""

from __future__ import annotations

from plimsoll.config.run import Goal
from plimsoll.spec.job import Names


def measured(name: str, goal: Goal | None) -> Names:
    """A figure and the ends of its confidence interval."""
    return {name: goal, f"{name}_low": goal, f"{name}_high": goal}


ACCURACY = measured("accuracy", "highest")
OF_PAIRS: Names = {
    "loss": "lowest",
    **ACCURACY,
    "rewards/margin": "highest",
    "rewards/chosen": None,
    "rewards/rejected": None,
}
