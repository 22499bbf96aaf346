"""The losses and the advantage estimator that the config chooses, ready to be called.

A new one is one new file and one config value: a file in policy_loss/, preference_loss/,
reward_loss/ or unpaired_loss/ with a function `loss`, in divergence/ with a function `compare`, or
in advantage/ with a function `estimate`; or, outside of Plimsoll, any function by import path. A
preference loss that compares with a reference takes it as its second positional parameter.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plimsoll.algorithm.inputs import (
    AdvantageInputs,
    Advantages,
    DivergenceInputs,
    DivergenceOutput,
    LossOutput,
    PolicyLossInputs,
    RewardLossInputs,
    UnpairedLossInputs,
)
from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import resolve_choice
from plimsoll.config.reference import needs_reference
from plimsoll.errors import ConfigError


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss, and whether it takes the reference's log-probs (`PairValues`) as its
    second argument, beside `PreferenceLossInputs`."""

    compute: Callable[..., LossOutput]
    needs_reference: bool


def policy_loss(choice: Choice) -> Callable[[PolicyLossInputs], LossOutput]:
    """The policy loss of the config, its options bound. Errors: see `resolve`."""
    return resolve(choice, "policy_loss")


def preference_loss(choice: Choice) -> PreferenceLoss:
    """The preference loss of the config, its options bound. Errors: see `resolve`."""
    arguments = ("inputs", "reference") if needs_reference(choice) else ("inputs",)
    return PreferenceLoss(resolve(choice, "preference_loss", arguments), len(arguments) == 2)


def reward_loss(choice: Choice) -> Callable[[RewardLossInputs], LossOutput]:
    """The reward loss of the config, its options bound. Errors: see `resolve`."""
    return resolve(choice, "reward_loss")


def unpaired_loss(choice: Choice) -> Callable[[UnpairedLossInputs], LossOutput]:
    """The unpaired loss of the config, its options bound. Errors: see `resolve`."""
    return resolve(choice, "unpaired_loss")


def divergence(choice: Choice) -> Callable[[DivergenceInputs], DivergenceOutput]:
    """The divergence of the config, its options bound. Errors: see `resolve`."""
    return resolve(choice, "divergence")


def advantage(choice: Choice) -> Callable[[AdvantageInputs], Advantages]:
    """The advantage estimator of the config, its options bound. Errors: see `resolve`."""
    return resolve(choice, "advantage")


def resolve(
    choice: Choice, package: str, arguments: tuple[str, ...] = ("inputs",)
) -> functools.partial[Any]:
    """The function that `choice` names in a package of algorithm/, its options checked and bound.

    Raises ConfigError for a name, option or option's value that cannot be used, and for a
    function that does not take just these positional arguments.
    """
    name, key = FUNCTIONS[package]
    try:
        function = resolve_choice(choice, f"{PACKAGE}.{package}", name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {choice.name!r} cannot be called as a function of {package}: {error}. It must "
            f"take its {' and '.join(arguments)} as the only positional "
            f"{'argument' if len(arguments) == 1 else 'arguments'}, and its options by keyword."
        ) from error
    return function
