"""Which of a model's modules are written as one that is known.

transformers' families have classes of their own, whose forwards are copies of Llama's where they do
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def is_written_as(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module's class does what that function does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _does(code) == _does(forward.__code__)


def _does(code: Any) -> tuple[Any, ...]:
    """Without the annotations, in which copies differ."""
    return code.co_code, code.co_consts, code.co_names
