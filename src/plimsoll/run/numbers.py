"""Work with numbers that may be NaN or infinite, and write them as JSON, which has neither."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import inf, isfinite, isnan, nan
from statistics import fmean
from typing import Any


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN for infinities of both signs, where `fmean` raises ValueError."""
    numbers = list(values)
    return nan if {inf, -inf} <= set(numbers) else fmean(numbers)


def rank(value: float) -> float:
    """Return a number to sort by: the value, or for NaN the lowest of all numbers.

    A list with NaN has no order: `sorted` and `max` return any.
    """
    return -inf if isnan(value) else value


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON text, in which NaN and infinity are null."""
    return json.dumps(finite_json(value), indent=indent, ensure_ascii=False, allow_nan=False)


def finite_json(value: Any) -> Any:
    """Return a value for strict JSON, in which NaN and infinity are null."""
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): finite_json(item) for key, item in value.items()}
        case list() | tuple():
            return [finite_json(item) for item in value]
        case _:
            return value
