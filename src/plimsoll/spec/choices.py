"""The functions that a config chooses by name, seen without importing them: they need torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice, positional_parameters
from plimsoll.config.problems import Problem, invalid, show
from plimsoll.errors import ConfigError
from plimsoll.spec.run_spec import RunSpec


def needs_reference(preference_loss: Choice) -> bool:
    """Whether a preference loss takes the reference's log-probs: as its second positional
    parameter, beside its inputs. True for a name that cannot be used, which the rules refuse."""
    function, _ = FUNCTIONS["preference_loss"]
    try:
        found = positional_parameters(preference_loss, f"{PACKAGE}.preference_loss", function)
    except ConfigError:
        return True
    return len(found) > 1


def is_own(choice: Choice) -> bool:
    """Whether it is a function by import path, which may report metrics of its own."""
    return ":" in choice.name


def check_choices(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Those that cannot be used: their names, their options and the options' values."""
    for package, choice in spec.job.choices(spec.config).items():
        function, key = FUNCTIONS[package]
        try:
            check_choice(choice, f"{PACKAGE}.{package}", function)
        except ConfigError as error:
            yield unusable(key, choice, error)


def unusable(key: str, choice: Choice, error: ConfigError) -> Problem:
    """A choice that is written at `key`, and why it cannot be used."""
    chosen = show(choice.model_dump(include={"name", "options"}))
    return invalid(key, chosen, str(error), "correct the name or the options")
