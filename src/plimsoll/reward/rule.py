"""Rules: one for each reward of the config, with its function and its check of references."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from plimsoll.config.rl import RewardConfig
from plimsoll.data.fields import reference_text
from plimsoll.errors import ConfigError, DataError, PlimsollError, failure
from plimsoll.records import Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.outcome import SHOWN_CHARACTERS
from plimsoll.reward.references import Check, reference_check


@dataclass(frozen=True)
class Rule:
    """One entry of the config's `rewards`."""

    name: str
    """The part's name in the config."""
    config: RewardConfig
    function: partial[Any] | None
    """The function that `config.name` names, its options bound; None for servers or a judge."""
    check: Check | None
    """The check of references that the function brings, if any."""

    @property
    def label(self) -> str:
        """The rule's name in messages, such as `reward 'mine' (my_rewards:short)`."""
        place = f" ({self.config.name})" if ":" in self.config.name else ""
        return f"reward {self.name!r}{place}"

    def adjust(self, value: float, trajectory: Trajectory) -> float:
        """Return a value clipped to `clip`, then times `truncated_factor` for a cut response.

        A value that is not finite stays as it is.
        """
        if self.config.clip is not None and math.isfinite(value):
            low, high = self.config.clip
            value = min(max(value, low), high)
        factor = self.config.truncated_factor
        truncated = trajectory.finish_reason == "length"
        return value if factor is None or not truncated else value * factor

    def check_reference(self, reference: object) -> None:
        """Check a reference, given as its row has it; do nothing if it is good.

        Raises DataError, naming the rule, if the check refuses the reference, and PlimsollError if
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
            where = f"The check of references of the {self.label}"
            text = f"The reference{quote_beginning(reference_text(reference))}."
            raise failure(where, error, text) from error


def build_rule(name: str, config: RewardConfig) -> Rule:
    """Return the rule of one entry of a config's `rewards`.

    Raises ConfigError if its function or an option cannot be used.
    """
    try:
        function = reward_function(config) if config.name else None
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error
    return Rule(name, config, function, None if function is None else reference_check(function))


def texts_of(trajectory: Trajectory) -> str:
    """Return two sentences for messages, with the beginnings of prompt and response."""
    texts = {"prompt": trajectory.prompt.text, "response": trajectory.response_text}
    return " ".join(f"The {name}{quote_beginning(text)}." for name, text in texts.items())


def quote_beginning(text: str) -> str:
    """Return the rest of a sentence that quotes a text: `: '...'`, or ` (cut): '...'` if long."""
    mark = " (cut)" if len(text) > SHOWN_CHARACTERS else ""
    return f"{mark}: {text[:SHOWN_CHARACTERS]!r}"
