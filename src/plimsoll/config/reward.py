"""Where the reward of a response comes from."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import Choice, PositiveInt, Settings
from plimsoll.config.engine import FrozenRole


class RewardConfig(Choice):
    """One part of the reward: a rule of Plimsoll's (`math_answer`, `pattern`, ...) or a Python
    function by import path, with its weight."""

    weight: float = 1.0
    """The part's weight in the sum."""


class StepsConfig(Settings):
    """How a process reward model's scores of steps become one of the response."""

    separator: str = "\n\n"
    """What stands between two steps, as in the data that the model learned from."""
    take: Literal["min", "mean", "product", "last"] = "min"
    """Of the steps' scores, each a probability of being right."""


class RewardModelConfig(Settings):
    """A trained reward model that scores whole responses: a sequence classifier with one label."""

    role: FrozenRole
    """The model, and how it is kept."""
    weight: float = 1.0
    """The score's weight in the sum."""
    tokenizer: Literal["actor", "own"] = "actor"
    """actor: the model reads the actor's tokens; own: the conversation is rendered by its own chat
    template, and tokenized by its own tokenizer."""
    chat_template: str | None = None
    """Of its own tokenizer: Jinja, a file of it, or `none` for plain text; default: the
    tokenizer's."""
    max_tokens: PositiveInt | None = None
    """Of what its own tokenizer makes; a longer conversation is cut at its beginning. Default: as
    many as the actor's longest sequence."""
    steps: StepsConfig | None = None
    """It is a process reward model, which scores steps; default: whole responses."""
