"""Make wrong values, as a broken device or server would return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np


def spoil(value: Any) -> Any:
    """Return a wrong copy of a value: NaN for a number, and for the first number of an array.

    In collections every entry is spoiled, in a dataclass every floating-point array or tensor. An
    array of whole numbers has a first entry that is larger by one. Other values stay as they are.
    """
    if isinstance(value, float | int):
        return float("nan")
    if isinstance(value, Mapping):
        return {key: spoil(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([spoil(entry) for entry in value])
    if is_dataclass(value) and not isinstance(value, type):
        numbers = ((f.name, getattr(value, f.name)) for f in fields(value))
        return replace(value, **{n: spoil(v) for n, v in numbers if _has_fractions(v)})
    return _spoil_array(value)


def _has_fractions(value: Any) -> bool:
    """Return whether a value is an array or tensor of floating-point numbers."""
    kind = getattr(value, "dtype", None)
    return kind is not None and "float" in str(kind)


def _spoil_array(value: Any) -> Any:
    """Return a copy of an array or tensor whose first entry is NaN, or one larger."""
    if not hasattr(value, "dtype"):
        return value
    copy = value.clone() if hasattr(value, "clone") else np.array(value)
    first = copy.reshape(-1)[:1]
    if _has_fractions(value):
        first[...] = float("nan")
    else:
        first += 1
    return copy
