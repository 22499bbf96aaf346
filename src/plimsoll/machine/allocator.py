"""Choose how PyTorch's allocator takes memory from a card: in fixed or in growing segments.

A fixed segment serves blocks up to its own size. A forward and backward pass asks for blocks of
many sizes, so the segments of one phase are too small for the next, which takes new ones; growing
segments (`expandable_segments:True`) leave no such gaps (docs/performance.md). Ranks use them
unless the user's environment sets something else. vLLM's engines do not: their own pool needs fixed
ones (device_allocator/cumem.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables that set the allocator. PyTorch reads only the first that is set, and ignores the
other (tried with 2.13; c10/core/AllocatorConfig.cpp).
"""

_EXPANDABLE = "expandable_segments"


def named_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the allocator settings of the user's environment as NAME=VALUE, or ""."""
    return next((f"{n}={environment[n]}" for n in VARIABLES if environment.get(n)), "")


def user_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the allocator settings of the user's environment; "" if there are none."""
    return named_settings(environment).partition("=")[2]


def expands(settings: str) -> bool:
    """Return whether segments grow with these settings, given as VALUE or NAME=VALUE."""
    return f"{_EXPANDABLE}:true" in settings.replace(" ", "").lower()


def with_segments(settings: str, expandable: bool) -> str:
    """Return the settings with only the kind of segments changed."""
    entries = (entry.strip() for entry in settings.split(","))
    kept = [entry for entry in entries if entry and not entry.startswith(_EXPANDABLE)]
    return ",".join([*kept, f"{_EXPANDABLE}:{expandable}"])
