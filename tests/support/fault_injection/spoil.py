"""Make wrong values, as a broken device or server would return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any


def spoil(value: Any) -> Any:
    """Return a wrong copy of a value: NaN for numbers, arrays and tensors.

    Whole numbers in arrays grow by one. In collections every entry is spoiled, in a dataclass every
    array or tensor that can hold NaN. Other values stay as they are.
    """
    if isinstance(value, float | int):
        return float("nan")
    if isinstance(value, Mapping):
        return {key: spoil(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([spoil(entry) for entry in value])
    if is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{n: spoil(v) for n, v in entries.items() if _has_fractions(v)})
    if not hasattr(value, "dtype"):
        return value
    return value * float("nan") if _has_fractions(value) else value + 1


def _has_fractions(value: Any) -> bool:
    """Return whether a value is an array or tensor of floating-point numbers."""
    return "float" in str(getattr(value, "dtype", ""))
