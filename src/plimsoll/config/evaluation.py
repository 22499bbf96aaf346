"""What the evaluation of each job reports, and which way each number is better: so that a choice by
one of them can be checked before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType

from plimsoll.config.jobs import (
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PairJobConfig,
    PpoConfig,
    PrmConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.config.run import Goal

Names = Mapping[str, Goal | None]
"""Metrics, and which value of each is the best; None where that is a matter of what is wanted."""

_LIKELIHOOD: Names = {"loss": "lowest", "perplexity": "lowest"}
_DISTILLATION: Names = {
    "loss": "lowest",
    "perplexity": "lowest",
    "divergence": "lowest",
    "nll": None,
}


def _measured(name: str, goal: Goal | None) -> Names:
    """A figure and the ends of its confidence interval."""
    return {name: goal, f"{name}_low": goal, f"{name}_high": goal}


_ACCURACY = _measured("accuracy", "highest")
_OF_PAIRS: Names = {
    "loss": "lowest",
    **_ACCURACY,
    "rewards/margin": "highest",
    "rewards/chosen": None,
    "rewards/rejected": None,
}
_PREFERENCE: Names = {**_OF_PAIRS, "preference_loss": "lowest", "nll": None}
_UNPAIRED: Names = {
    "loss": "lowest",
    **_ACCURACY,
    "rewards/margin": "highest",
    "rewards/desirable": None,
    "rewards/undesirable": None,
    "kl": None,
}
_SCORES: Names = {
    **_OF_PAIRS,
    "reward_loss": "lowest",
    "off_centre": "lowest",
    "calibration_error": "lowest",
}
_STEPS: Names = {
    "loss": "lowest",
    "accuracy": "highest",
    "labels": None,
    "calibration_error": "lowest",
    **_measured("solution_accuracy", "highest"),
    "right_solutions": None,
}


def evaluation_metrics(config: JobConfig) -> Names:
    """The names under which the evaluation of a run is written, such as `eval/loss`; what only some
    data have is among them."""
    return MappingProxyType({f"eval/{name}": goal for name, goal in _names(config).items()})


def _names(config: JobConfig) -> Names:
    match config:
        case SftConfig():
            return _LIKELIHOOD
        case DistillConfig():
            return _DISTILLATION
        case DpoConfig():
            return _PREFERENCE
        case KtoConfig():
            return _UNPAIRED
        case RmConfig():
            return _SCORES
        case PrmConfig():
            return _STEPS
        case PpoConfig():
            parts = [*config.rewards, *(["reward_model"] if config.reward_model else [])]
            rewards = chain.from_iterable(_measured(name, None).items() for name in parts)
            return {**_measured("reward", "highest"), **dict(rewards)}


def reports_more(config: JobConfig) -> bool:
    """Whether there may be other metrics than those: a loss by import path has its own."""
    if not isinstance(config, PairJobConfig | KtoConfig):
        return False
    return ":" in config.algorithm.loss.name
