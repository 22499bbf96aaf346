"""What one call of a reward came to, for one trajectory: a number, a failure, a broken contract.

Of plain numbers and text, so that it crosses processes as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from plimsoll.algorithm.failure import told_of
from plimsoll.errors import ConfigError, FunctionFailed, PlimsollError

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Given:
    """A finite number."""

    value: float


@dataclass(frozen=True)
class Failed:
    """No number this time; another try may give one. said: goes on after the reward's name. lines:
    of a traceback."""

    said: str
    lines: str = ""
    kind: type[PlimsollError] = PlimsollError


@dataclass(frozen=True)
class Broken:
    """What no other try would mend: something else than a number, or other inputs than it needs.
    said: as of `Failed`."""

    said: str
    kind: type[PlimsollError] = PlimsollError


Outcome = Given | Failed | Broken


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
    told, lines = told_of(error)
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
