"""Whether a loss is compared with a reference, seen without importing it."""

from __future__ import annotations

from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import positional_parameters


def needs_reference(preference_loss: Choice) -> bool:
    """Whether a preference loss takes the reference's log-probs: as its second positional
    parameter, beside its inputs.

    Raises ConfigError for a name that cannot be used.
    """
    function, _ = FUNCTIONS["preference_loss"]
    package = f"{PACKAGE}.preference_loss"
    return len(positional_parameters(preference_loss, package, function)) > 1
