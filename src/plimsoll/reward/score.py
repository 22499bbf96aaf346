"""From the config's rewards to a function that scores a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real

from plimsoll.config.choice import resolve_choice
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.records import RewardPart, Trajectory

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class _Rule:
    name: str
    weight: float
    function: Callable[[Trajectory], object]


@dataclass(frozen=True)
class Scorer:
    """Gives a trajectory its reward parts, in the order of the config."""

    rules: tuple[_Rule, ...]

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        """A new trajectory with the parts.

        Raises PlimsollError, naming rule, row, prompt and response, where a rule fails or gives
        something else than a finite number.
        """
        return replace(trajectory, rewards=tuple(_part(rule, trajectory) for rule in self.rules))


def build_rewards(rewards: Mapping[str, RewardConfig]) -> Scorer:
    """The scorer of a config's `rewards`.

    Raises ConfigError where a rule or an option cannot be used.
    """
    return Scorer(tuple(_rule(name, config) for name, config in rewards.items()))


def _rule(name: str, config: RewardConfig) -> _Rule:
    try:
        function = resolve_choice(config, "plimsoll.reward", "reward")
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error
    return _Rule(name, config.weight, function)


def _part(rule: _Rule, trajectory: Trajectory) -> RewardPart:
    try:
        value = rule.function(trajectory)
    except PlimsollError as error:
        raise type(error)(f"{_where(rule, trajectory)}: {error}") from error
    except (Exception, SystemExit) as error:  # own code may do anything, and the row must be known
        raise PlimsollError(
            f"{_where(rule, trajectory)} raised {type(error).__name__}: {error}. "
            f"{_shown(trajectory)}"
        ) from error
    if not isinstance(value, Real) or not _is_finite(value):
        raise PlimsollError(
            f"{_where(rule, trajectory)} gave {value!r} ({type(value).__name__}), and a reward "
            f"must be a finite number. {_shown(trajectory)}"
        )
    return RewardPart(rule.name, float(value), rule.weight)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _where(rule: _Rule, trajectory: Trajectory) -> str:
    return f"The reward {rule.name!r}, at row {trajectory.prompt.index} of the data"


def _shown(trajectory: Trajectory) -> str:
    texts = {"prompt": trajectory.prompt.text, "response": trajectory.response_text}
    return " ".join(f"The {name}{_cut(text)}." for name, text in texts.items())


def _cut(text: str) -> str:
    cut = " (cut)" if len(text) > _SHOWN_CHARACTERS else ""
    return f"{cut}: {text[:_SHOWN_CHARACTERS]!r}"
