"""How many examples a property gets that takes longer than others."""

from __future__ import annotations

from hypothesis import settings


def percent(part: int) -> int:
    """Return so many percent of the examples that each property gets (tests/conftest.py)."""
    assert settings.default is not None
    return max(1, settings.default.max_examples * part // 100)
