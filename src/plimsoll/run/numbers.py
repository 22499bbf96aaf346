"""Write numbers as text: counts, sizes and times, and JSON, which has neither NaN nor infinity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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


def first_of(words: Sequence[str], most: int) -> str:
    """Return the first words as text, such as `3, 5 and 2 more`."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"


def plural(count: int, what: str) -> str:
    """Return a count with its noun, such as `1 row` or `2,048 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def gigabytes(size: int) -> str:
    """Return bytes as decimal gigabytes without unit: three digits (`1.93`), or more (`1,930`)."""
    digits = 2 if size < 9.995e9 else 1 if size < 99.95e9 else 0
    return f"{size / 1e9:,.{digits}f}"


def bytes_text(count: float) -> str:
    """Return bytes with a binary unit, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration_text(seconds: float) -> str:
    """Return seconds, rounded to whole ones, as `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


def gigabytes_text(count: float) -> str:
    """Return bytes with a decimal unit and three digits, such as `1.93 GB` or `42.1 MB`."""
    if abs(count) < 0.9995e6:
        return f"{count / 1e3:.3g} kB"
    return f"{count / 1e6:.3g} MB" if abs(count) < 0.9995e9 else f"{_gigabytes(count)} GB"


def use_text(measured: int, predicted: int | None) -> str:
    """Return measured and predicted bytes as `1.93 GB (plan 2.1)`; only the measured if None."""
    if predicted is None:
        return gigabytes_text(measured)
    return f"{_gigabytes(measured)} GB (plan {_gigabytes(predicted)})"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g}" if abs(count) < 999.5e9 else f"{count / 1e9:.0f}"
