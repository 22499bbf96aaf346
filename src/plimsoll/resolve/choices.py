"""Inspect the functions that a config chooses by name, without importing them: they need torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice, positional_parameters
from plimsoll.config.problems import Problem, invalid, show
from plimsoll.config.rl import FUNCTIONS, PACKAGE
from plimsoll.errors import ConfigError
from plimsoll.resolve.run_spec import RunSpec


def needs_reference(preference_loss: Choice) -> bool:
    """Return whether a preference loss takes the reference's log-probs.

    It does if it has a second positional parameter. The result is also True for a name that cannot
    be used; the rules refuse that name.
    """
    parameters = _parameters("preference_loss", preference_loss)
    return parameters is None or len(parameters) > 1


def needs_sampler(policy_loss: Choice) -> bool:
    """Return whether a policy loss takes the sampler's log-probs.

    It does if it has a second positional parameter. Such a loss itself corrects for the difference
    between the sampler's and the trainer's log-probs.
    """
    return len(_parameters("policy_loss", policy_loss) or ()) > 1


AdvantageNeed = Literal["values_L", "group_S", "greedy_S", "turn_L"]
"""Names of further positional parameters that an advantage estimator may have: the critic's values;
a group number, equal for all responses to one prompt; the reward of the greedy response to the same
prompt; the number of each token's turn in its episode."""


def advantage_needs(advantage: Choice) -> tuple[AdvantageNeed, ...]:
    """Return the further parameters that an estimator takes, in their order.

    The result is empty for a name that cannot be used; the rules refuse that name.
    """
    parameters = _parameters("advantage", advantage) or ()
    known = (name for name in parameters[1:] if name in get_args(AdvantageNeed))
    return tuple(cast(AdvantageNeed, name) for name in known)


def unknown_needs(advantage: Choice) -> tuple[str, ...]:
    """Return the estimator's positional parameters that are not in `AdvantageNeed`."""
    parameters = _parameters("advantage", advantage) or ()
    return tuple(name for name in parameters[1:] if name not in get_args(AdvantageNeed))


def is_known(kind: str, choice: Choice) -> bool:
    """Return whether the choice names a function that can be used."""
    return _parameters(kind, choice) is not None


def _parameters(kind: str, choice: Choice) -> tuple[str, ...] | None:
    """Return a function's positional parameters; None if its name or options cannot be used."""
    try:
        return positional_parameters(choice, f"{PACKAGE}.{kind}")
    except ConfigError:
        return None


def is_own(choice: Choice) -> bool:
    """Return whether the function is the user's code, which may report further metrics."""
    return ":" in choice.name


def check_choices(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each choice with a wrong name, option or value of an option."""
    for kind, choice in spec.job.choices(spec.config).items():
        try:
            check_choice(choice, f"{PACKAGE}.{kind}")
        except ConfigError as error:
            yield unusable(FUNCTIONS[kind], choice, error)


def unusable(key: str, choice: Choice, error: ConfigError) -> Problem:
    """Return the problem for a choice at `key` that cannot be used, with the error's reason."""
    chosen = show(choice.model_dump(include={"name", "options"}))
    return invalid(key, chosen, str(error), "correct the name or the options")
