"""The losses, the advantage estimator and the rewards that a config names, before anything is
loaded; of Plimsoll's own, free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice, resolve_choice
from plimsoll.config.data import SourceConfig
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
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.reward.references import reference_check

REWARDS = "plimsoll.reward"


def check_choices(config: JobConfig) -> Iterator[Problem]:
    """Those that cannot be used: their names, their options and the options' values."""
    for package, choice in _algorithms(config).items():
        function, key = FUNCTIONS[package]
        yield from _check(key, choice, check_choice, f"{PACKAGE}.{package}", function)
    if isinstance(config, RlJobConfig):
        problems = [
            problem
            for name, part in config.rewards.items()
            for problem in _check(f"rewards.{name}", part, resolve_choice, REWARDS, "reward")
        ]
        yield from problems or check_references(config.rewards, config.data.sources())


def check_references(
    rewards: Mapping[str, RewardConfig], sources: Mapping[str, SourceConfig]
) -> Iterator[Problem]:
    """Sources without the references that rewards compare with. sources: by their keys in the
    config."""
    chosen = {name: resolve_choice(part, REWARDS, "reward") for name, part in rewards.items()}
    comparing = [name for name, reward in chosen.items() if reference_check(reward) is not None]
    for key, source in sources.items():
        if comparing and source.reference is None:
            parts = " and ".join(f"rewards.{name}" for name in comparing)
            why = f"There is no column of reference answers, and {parts} would compare with them."
            instead = f"{key}.reference: COLUMN, or other rewards"
            yield Problem(f"{key}.reference", None, why, instead, code="data-columns")


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
