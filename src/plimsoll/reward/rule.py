"""A part of the reward as the config gives it, checked, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.algorithm.failure import failure
from plimsoll.config.reward import RewardConfig
from plimsoll.data.fields import reference_text
from plimsoll.errors import ConfigError, DataError, PlimsollError
from plimsoll.records import Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.outcome import SHOWN_CHARACTERS
from plimsoll.reward.references import Check, reference_check


@dataclass(frozen=True)
class Rule:
    """function: what `config.name` names, its options bound; None where `config` names servers or a
    judge. check: what it brings to look at references, if anything."""

    name: str
    config: RewardConfig
    function: partial[Any] | None
    check: Check | None

    @property
    def shown(self) -> str:
        """As messages name it, such as `reward 'mine' (my_rewards:short)`."""
        own = f" ({self.config.name})" if ":" in self.config.name else ""
        return f"reward {self.name!r}{own}"

    def adjusted(self, value: float, trajectory: Trajectory) -> float:
        """A value within the bounds of `clip`, times `truncated_factor` where that holds."""
        if self.config.clip is not None:
            low, high = self.config.clip
            value = min(max(value, low), high)
        factor = self.config.truncated_factor
        truncated = trajectory.finish_reason == "length"
        return value if factor is None or not truncated else value * factor

    def check_reference(self, reference: object) -> None:
        """Look at a reference as its row has it, before anything is sampled, where the rule
        compares with them.

        Raises DataError, naming the rule, where it cannot be compared with, and PlimsollError where
        the check itself fails.
        """
        try:
            if self.check is not None:
                self.check(reference)
        except ValueError as error:
            raise DataError(f"is no reference for the reward {self.name!r}: {error}") from error
        except PlimsollError:
            raise
        except Exception as error:
            where = f"The check of references of the {self.shown}"
            told = f"The reference{cut(reference_text(reference))}."
            raise failure(where, error, told) from error


def build_rule(name: str, config: RewardConfig) -> Rule:
    """A part of a config's `rewards`. Raises ConfigError where it, or an option, cannot be used."""
    try:
        function = reward_function(config) if config.name else None
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error
    return Rule(name, config, function, None if function is None else reference_check(function))


def shown_texts(trajectory: Trajectory) -> str:
    """Prompt and response as messages show them."""
    texts = {"prompt": trajectory.prompt.text, "response": trajectory.response_text}
    return " ".join(f"The {name}{cut(text)}." for name, text in texts.items())


def cut(text: str) -> str:
    """A text as messages show it, after its name."""
    mark = " (cut)" if len(text) > SHOWN_CHARACTERS else ""
    return f"{mark}: {text[:SHOWN_CHARACTERS]!r}"
