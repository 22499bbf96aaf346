"""The settings and packages of the local machine that matter to a run.

PyTorch's allocator takes memory from a card in fixed or in growing segments. A fixed one serves
blocks up to its own size. A forward and backward pass asks for blocks of many sizes, so the
segments of one phase are too small for the next, which takes new ones; growing segments
(`expandable_segments:True`) leave no such gaps (docs/performance.md). Ranks use them unless the
user's environment sets something else. vLLM's engines do not: their own pool needs fixed ones
(device_allocator/cumem.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plimsoll.machine.heap import is_chosen, library
from plimsoll.machine.host import live_host, multiplies_bfloat16
from plimsoll.machine.nvidia import own_cards
from plimsoll.machine.versions import Package, installed_versions

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


@dataclass(frozen=True)
class LocalHost:
    """The settings and packages of this machine that the plan depends on."""

    allocator: str
    """The settings of PyTorch's CUDA allocator in the environment, as NAME=VALUE, or ""."""
    versions: Mapping[str, str]
    """The version of each checked package that is installed."""
    free_bytes: tuple[int, ...]
    """The free bytes of each GPU that a run would see, or of the host if the GPU shares its memory.
    """
    jemalloc: bool
    """Whether CPU processes use jemalloc as their heap, or a heap that LD_PRELOAD names."""
    bfloat16: bool
    """Whether this machine's CPU has (and may use) instructions for matrix products in bfloat16."""


def read_local_host(packages: Iterable[Package]) -> LocalHost:
    """Return the LocalHost of this machine; `packages` are the packages to look for.

    Raises PlimsollError if NVIDIA's driver is installed and fails.
    """
    versions = installed_versions(packages)
    cards = own_cards()
    return LocalHost(
        named_settings(),
        {name: version for name, version in versions.items() if version is not None},
        tuple(c.free_bytes if c.total_bytes else live_host().free_bytes for c in cards),
        jemalloc=library() is not None or is_chosen(),
        bfloat16=multiplies_bfloat16(),
    )
