"""What one call of a reward came to, for one trajectory: a number, a failure, a broken contract.

Of plain numbers and text, so that it crosses processes as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from plimsoll.algorithm.failure import describe_error
from plimsoll.errors import ConfigError, FunctionFailed, PlimsollError

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Given:
    """A finite number."""

    value: float


@dataclass(frozen=True)
class Failed:
    """No number this time; another try may give one.

    Attributes:
        said: what is wrong, going on after the reward's name.
        lines: lines of a traceback.
        kind: the error that stops a run for it.
        unanswered: whether no answer came at all, in time or from anybody. Such a try takes long,
            so the first one is shown at once.
    """

    said: str
    lines: str = ""
    kind: type[PlimsollError] = PlimsollError
    unanswered: bool = False


@dataclass(frozen=True)
class Broken:
    """What no other try would mend: something else than a number, or other inputs than it needs.
    said: as of `Failed`."""

    said: str
    kind: type[PlimsollError] = PlimsollError


@dataclass(frozen=True)
class Unasked:
    """Nothing, because a number would be of no use: the trajectory's group is lost already."""


Outcome = Given | Failed | Broken | Unasked


@dataclass(frozen=True)
class TimeLimit:
    """How long one try may take.

    Attributes:
        seconds: the limit.
        key: the config's key that sets it, such as `rewards.style.time_limit`.
    """

    seconds: float
    key: str

    def exceeded(self, before: str = "", after: str = "") -> Failed:
        """Return the failure of a try that took longer; the texts stand around what is said."""
        limit = f"its time_limit of {self.seconds:g} s ({self.key})"
        return Failed(f"{before} took longer than {limit}{after}", unanswered=True)


def number(value: object) -> Outcome:
    """What a reward gave for one trajectory, if it is a finite number."""
    found = finite(value)
    if found is None:
        kind = type(value).__name__
        return Broken(f" gave {shown(value)} ({kind}), and a reward must be a finite number")
    return Given(found)


def numbers(values: object, wanted: int) -> list[Outcome]:
    """What a reward gave for several trajectories; a list, or an array of NumPy's or torch's."""
    tolist = getattr(values, "tolist", None)
    given = tolist() if callable(tolist) else values
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        kind = type(values).__name__
        said = f" gave {shown(values)} ({kind}), and a list of numbers is needed, one for each of "
        return [Broken(f"{said}{wanted} responses")] * wanted
    if len(given) != wanted:
        said = f" gave {len(given)} numbers for {wanted} responses: {shown(given)}"
        return [Broken(said)] * wanted
    return [number(value) for value in given]


def raised(error: BaseException) -> Failed | Broken:
    """Of a function that raised. To be asked where the function is called."""
    if isinstance(error, ConfigError):  # what was asked of it cannot be answered, now or later
        return Broken(f": {str(error).rstrip('.')}", type(error))
    if isinstance(error, PlimsollError):
        return Failed(f": {str(error).rstrip('.')}", "", type(error))
    told, lines = describe_error(error)
    return Failed(f" raised {told}", lines, FunctionFailed)


def finite(value: object) -> float | None:
    """A number of Python's, NumPy's or torch's; None for anything else, and for NaN or infinity."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # many numbers; or one too large
        return None
    return found if math.isfinite(found) else None


def shown(value: object) -> str:
    """As Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of over 4,300 digits
        text = object.__repr__(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
