"""What a reward function says of itself: whether it takes one trajectory or many."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_origin, get_type_hints


def takes_many(function: partial[Any]) -> bool:
    """Whether its first parameter is annotated as a list or another sequence."""
    return get_origin(_first_annotation(function.func)) in (list, tuple, Sequence)


def is_coroutine(function: partial[Any]) -> bool:
    """Whether it is an `async def`."""
    return inspect.iscoroutinefunction(function.func)


def _first_annotation(function: Callable[..., Any]) -> object:
    parameters = [*inspect.signature(function).parameters.values()]
    written = parameters[0].annotation if parameters else None
    if not isinstance(written, str):
        return written
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker imports
        return Sequence[Any] if written.startswith(_MANY) else None
    return hints.get(parameters[0].name)


_MANY = ("list[", "tuple[", "Sequence[", "collections.abc.Sequence[")
