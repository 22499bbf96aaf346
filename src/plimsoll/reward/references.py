"""What a reward says of a reference answer before anything is sampled.

A reward that compares with references brings a function that looks at one. It is called for
every reference while the rows are read, so that one that nothing could equal is a bad row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Check = Callable[[str], object]
"""Looks at a reference; raises ValueError, saying what is wrong with it."""

_ATTRIBUTE = "check_reference"
_Reward = TypeVar("_Reward", bound=Callable[..., Any])


def checks_references(check: Callable[..., object]) -> Callable[[_Reward], _Reward]:
    """Mark a reward as one that needs references, each of which `check` looks at before a run.

    check: takes a reference, and by keyword those of the reward's options that it names; raises
    ValueError, saying what is wrong with the reference and what to write instead.
    """

    def mark(reward: _Reward) -> _Reward:
        setattr(reward, _ATTRIBUTE, check)
        return reward

    return mark


def reference_check(reward: partial[Any]) -> Check | None:
    """The check that a reward brings, with its own share of the options that are bound; None where
    it brings none."""
    check = getattr(reward.func, _ATTRIBUTE, None)
    if check is None:
        return None
    named = inspect.signature(check).parameters
    return partial(check, **{name: v for name, v in reward.keywords.items() if name in named})
