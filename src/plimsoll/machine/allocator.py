"""How PyTorch's allocator takes memory from a card: in fixed segments, or in ones that grow.

A fixed segment serves blocks up to its own size. A forward and backward asks for blocks of many
sizes, so the segments of one phase are too small for the next, which takes new ones: on an H200
ranks kept 18 to 40 % more than their tensors needed. A segment that grows
(`expandable_segments:True`) leaves no such gaps. Ranks use these unless the user's environment
says otherwise. vLLM's engines do not: its own pool needs fixed ones (device_allocator/cumem.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where a user sets the allocator. PyTorch reads only the first that is there, whatever the other
says (tried with 2.13; c10/core/AllocatorConfig.cpp)."""

_EXPANDABLE = "expandable_segments"


def named_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return what the user's environment says of the allocator, as NAME=VALUE; "" for nothing."""
    return next((f"{n}={environment[n]}" for n in VARIABLES if environment.get(n)), "")


def user_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of `named_settings` alone."""
    return named_settings(environment).partition("=")[2]


def expands(settings: str) -> bool:
    """Whether segments grow by these settings, named or not."""
    return f"{_EXPANDABLE}:true" in settings.replace(" ", "").lower()


def with_segments(settings: str, expandable: bool) -> str:
    """Return the settings with only the kind of segments changed."""
    others = (one.strip() for one in settings.split(","))
    kept = [one for one in others if one and not one.startswith(_EXPANDABLE)]
    return ",".join([*kept, f"{_EXPANDABLE}:{expandable}"])
