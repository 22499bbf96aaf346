"""The outcome of one reward call for one trajectory: a number or a kind of failure.

Outcomes hold only plain numbers and text, so they can be sent between processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from plimsoll.errors import ConfigError, FunctionFailed, PlimsollError, describe_error

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Given:
    """A finite number (or, for a `Scorer` that keeps bad numbers, any)."""

    value: float


@dataclass(frozen=True)
class Failed:
    """No number this time; another try may give one.

    Attributes:
        said: The text of the failure, which continues after the reward's name.
        lines: Lines of a traceback, or the last lines that a process wrote.
        kind: The error that stops a run.
        unanswered: Whether there was no answer in time, or none at all. Such a try takes long, so
            the first one is reported at once.
    """

    said: str
    lines: str = ""
    kind: type[PlimsollError] = PlimsollError
    unanswered: bool = False


@dataclass(frozen=True)
class Broken:
    """A failure that another try cannot mend, such as text instead of a number.

    Attributes:
        said: As in `Failed`.
        kind: As in `Failed`.
        number: NaN or the infinite number that was given; None if it was something else.
    """

    said: str
    kind: type[PlimsollError] = PlimsollError
    number: float | None = None


@dataclass(frozen=True)
class Unasked:
    """No number, because the reward was not called: the trajectory's group is already lost."""


Outcome = Given | Failed | Broken | Unasked


@dataclass(frozen=True)
class TimeLimit:
    """The longest time of one try, and the key that sets it, such as `rewards.style.time_limit`."""

    seconds: float
    key: str

    def failure(self, before: str = "", after: str = "") -> Failed:
        """Return the failure of a try that took longer, with texts before and after the reason."""
        limit = f"its time_limit of {self.seconds:g} s ({self.key})"
        return Failed(f"{before} took longer than {limit}{after}", unanswered=True)


def number(value: object) -> Outcome:
    """Return a reward's value as `Given` if it is a finite number, else `Broken`."""
    given = _float(value)
    if given is None or not math.isfinite(given):
        said = f" gave {short_repr(value)} ({type(value).__name__})"
        return Broken(f"{said}, and a reward must be a finite number", number=given)
    return Given(given)


def numbers(values: object, wanted: int) -> list[Outcome]:
    """Return one outcome for each of `wanted` trajectories from a reward's list or array.

    All of them are `Broken` if there is no list, or if its length is wrong.
    """
    tolist = getattr(values, "tolist", None)
    given = tolist() if callable(tolist) else values
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        kind = type(values).__name__
        needed = f"a list of numbers is needed, one for each of {wanted} responses"
        return [Broken(f" gave {short_repr(values)} ({kind}), and {needed}")] * wanted
    if len(given) != wanted:
        said = f" gave {len(given)} numbers for {wanted} responses: {short_repr(given)}"
        return [Broken(said)] * wanted
    return [number(value) for value in given]


def error_outcome(error: BaseException) -> Failed | Broken:
    """Return `Failed` or `Broken` for an error that a reward function raised.

    Call this in the frame that called the function: that frame is left out of the traceback.
    """
    if isinstance(error, ConfigError):  # no other try would mend it
        return Broken(f": {str(error).rstrip('.')}", type(error))
    if isinstance(error, PlimsollError):
        return Failed(f": {str(error).rstrip('.')}", "", type(error))
    description, lines = describe_error(error)
    return Failed(f" raised {description}", lines, FunctionFailed)


def finite(value: object) -> float | None:
    """Return a finite number (of Python, NumPy or torch) as a float; None for anything else."""
    given = _float(value)
    return given if given is not None and math.isfinite(given) else None


def _float(value: object) -> float | None:
    """Return a number (of Python, NumPy or torch) as a float; None for anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # many numbers; or one too large
        return None


def safe_repr(value: object) -> str:
    """Return a value's `repr`; only its type and address if it has an integer too long for it."""
    try:
        return repr(value)
    except ValueError:  # an integer of over 4,300 digits
        return object.__repr__(value)


def short_repr(value: object) -> str:
    """Return a value's `repr`, cut to `SHOWN_CHARACTERS`."""
    text = safe_repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
