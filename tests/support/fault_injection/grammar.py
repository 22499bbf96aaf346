"""Read the faults that are written in the environment variable `PLIMSOLL_FAULTS`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_injection.points import CONDITIONS, KINDS, POINTS, FaultPoint
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import DIRECTORY, FAULTS, PROCESS


@dataclass(frozen=True)
class Fault:
    """One fault of the variable: where, what, and when."""

    text: str
    point: FaultPoint
    kind: str
    seconds: float
    """How long `delay` waits."""
    conditions: Mapping[str, str]

    def is_due(self, step: int | None, call: int, earlier: int) -> bool:
        """Return whether all conditions hold at this call, but for `once`."""
        numbers = {"step": step, "call": call, **_process_numbers()}
        wanted = {key: int(self.conditions[key]) for key in _WHOLE if key in self.conditions}
        if any(numbers.get(key) != number for key, number in wanted.items()):
            return False
        if time.time() < float(self.conditions.get("after", 0)):
            return False
        if "p" not in self.conditions:
            return True
        where = f"{self.point.name} {os.environ.get(PROCESS, 'controller')} {call} {earlier}"
        draw = random.Random(f"{self.conditions.get('seed', '0')} {where}").random()
        return draw < float(self.conditions["p"])


_WHOLE = ("step", "call", "rank", "engine")
"""The conditions whose value is a whole number that the process must have."""


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults of a variable's text.

    Raises:
        ConfigError: A point, kind or condition does not exist; the message lists those that do.
    """
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _process_numbers() -> dict[str, int]:
    name, _, number = os.environ.get(PROCESS, "").partition("=")
    # A run in one process is rank 0 and engine 0 at once.
    return {name: int(number)} if number else {"rank": 0, "engine": 0}


def faults_directory() -> Path | None:
    """Return the directory for marks and records; None if the variable is not set."""
    return Path(os.environ[DIRECTORY]) if os.environ.get(DIRECTORY) else None


def _parse(text: str) -> Fault:
    name, _, rest = text.partition(":")
    kind_text, _, when = rest.partition(":")
    kind, has_seconds, seconds = kind_text.partition("=")
    _check(text, "point", name, POINTS)
    _check(text, "kind", kind, KINDS)
    point = POINTS[name]
    _check(text, f"kind at {name}", kind, point.kinds)
    if has_seconds and kind != "delay":
        raise ConfigError(f"{FAULTS}: {text}: {kind} takes no number; only delay=SECONDS does.")
    conditions: dict[str, str] = {}
    for condition in filter(None, when.split("+")):
        key, _, value = condition.partition("=")
        _check(text, "condition", key, CONDITIONS)
        _check_value(text, key, value)
        conditions[key] = value
    if "step" in conditions and not point.has_step:
        raise ConfigError(f"{FAULTS}: {text}: {name} does not know the step. Use call=N.")
    if "after" in conditions and "once" not in conditions:
        raise ConfigError(
            f"{FAULTS}: {text}: from then on it would happen at every call. Add +once."
        )
    if "once" in conditions and faults_directory() is None:
        raise ConfigError(
            f"{FAULTS}: {text}: `once` needs a directory for its mark. Set {DIRECTORY} to one that "
            "all processes can write to."
        )
    return Fault(text, point, kind, _number(text, "delay", seconds or "5"), conditions)


def _check(text: str, what: str, name: str, known: Mapping[str, Any] | Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{FAULTS}: {text}: there is no {what} {name!r}. There are: {', '.join(known)}."
        )


def _check_value(text: str, key: str, value: str) -> None:
    """Raise ConfigError if a condition's value is not what the condition takes."""
    if key == "once":
        if value:
            raise ConfigError(f"{FAULTS}: {text}: once takes no value.")
    elif key == "p":
        if not 0 <= _number(text, key, value) <= 1:
            raise ConfigError(f"{FAULTS}: {text}: p is {value}; a probability is from 0 to 1.")
    elif not value.isdecimal():
        raise ConfigError(f"{FAULTS}: {text}: {key} is {value!r}; write a whole number.")


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{FAULTS}: {text}: {key} is {value!r}; write a number, 0 or more.")
    return number
