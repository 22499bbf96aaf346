"""The functions that a config chooses by name, seen without importing them: they need torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice, positional_parameters
from plimsoll.config.problems import Problem, invalid, show
from plimsoll.errors import ConfigError
from plimsoll.spec.run_spec import RunSpec


def needs_reference(preference_loss: Choice) -> bool:
    """Return whether a preference loss takes the reference's log-probs.

    They are its second positional parameter, beside its inputs. True for a name that cannot be
    used, which the rules refuse.
    """
    parameters = _parameters("preference_loss", preference_loss)
    return parameters is None or len(parameters) > 1


def needs_sampler(policy_loss: Choice) -> bool:
    """Return whether a policy loss takes the sampler's log-probs.

    They are its second positional parameter. Such a loss makes up by itself for their difference
    from the trainer's.
    """
    return len(_parameters("policy_loss", policy_loss) or ()) > 1


AdvantageNeed = Literal["values_L", "group_S", "greedy_S", "turn_L"]
"""What an advantage estimator may ask for besides its inputs, by the names of its positional
parameters: the critic's values; a number that the responses of one prompt share; the reward of the
greedy response to the same prompt; the number of each token's turn in its episode."""


def advantage_needs(advantage: Choice) -> tuple[AdvantageNeed, ...]:
    """Return what an estimator needs, in the order of its parameters.

    Nothing for a name that cannot be used, which the rules refuse.
    """
    parameters = _parameters("advantage", advantage) or ()
    known = (name for name in parameters[1:] if name in get_args(AdvantageNeed))
    return tuple(cast(AdvantageNeed, name) for name in known)


def unknown_needs(advantage: Choice) -> tuple[str, ...]:
    """Return the positional parameters of an estimator for which there is no known value."""
    parameters = _parameters("advantage", advantage) or ()
    return tuple(name for name in parameters[1:] if name not in get_args(AdvantageNeed))


def is_known(package: str, choice: Choice) -> bool:
    """Return whether there is a function of this name; the rules refuse any other."""
    return _parameters(package, choice) is not None


def _parameters(package: str, choice: Choice) -> tuple[str, ...] | None:
    """Return the positional parameters of a function, or None for a name that cannot be used."""
    function, _ = FUNCTIONS[package]
    try:
        return positional_parameters(choice, f"{PACKAGE}.{package}", function)
    except ConfigError:
        return None


def is_own(choice: Choice) -> bool:
    """Return whether it is a function of one's own, which may report metrics of its own."""
    return ":" in choice.name


def check_choices(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield the choices that cannot be used: wrong names, options or values of options."""
    for package, choice in spec.job.choices(spec.config).items():
        function, key = FUNCTIONS[package]
        try:
            check_choice(choice, f"{PACKAGE}.{package}", function)
        except ConfigError as error:
            yield unusable(key, choice, error)


def unusable(key: str, choice: Choice, error: ConfigError) -> Problem:
    """Return the problem of a choice at `key` that cannot be used, with the error's reason."""
    chosen = show(choice.model_dump(include={"name", "options"}))
    return invalid(key, chosen, str(error), "correct the name or the options")
