"""The losses, the advantage estimator and the rewards that a config names, before anything is
loaded; of Plimsoll's own, free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice, resolve_choice
from plimsoll.config.jobs import (
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PpoConfig,
    PrmConfig,
    RlJobConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.config.problems import Problem, show
from plimsoll.errors import ConfigError


def check_choices(config: JobConfig) -> Iterator[Problem]:
    """Those that cannot be used: their names, their options and the options' values."""
    for package, choice in _algorithms(config).items():
        function, key = FUNCTIONS[package]
        yield from _check(key, choice, check_choice, f"{PACKAGE}.{package}", function)
    if isinstance(config, RlJobConfig):
        for name, part in config.rewards.items():
            yield from _check(f"rewards.{name}", part, resolve_choice, "plimsoll.reward", "reward")


def _algorithms(config: JobConfig) -> dict[str, Choice]:
    """What the config chooses of each package of algorithm/."""
    match config:
        case DpoConfig():
            return {"preference_loss": config.algorithm.loss}
        case KtoConfig():
            return {"unpaired_loss": config.algorithm.loss}
        case RmConfig():
            return {"reward_loss": config.algorithm.loss}
        case DistillConfig():
            return {"divergence": config.algorithm.divergence}
        case PpoConfig():
            algorithm = config.algorithm
            return {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss}
        case SftConfig() | PrmConfig():
            return {}


def _check(
    key: str, choice: Choice, check: Callable[[Choice, str, str], object], package: str, name: str
) -> Iterator[Problem]:
    try:
        check(choice, package, name)
    except ConfigError as error:
        chosen = show(choice.model_dump(include={"name", "options"}))
        yield Problem(key, chosen, str(error), "correct the name or the options")
