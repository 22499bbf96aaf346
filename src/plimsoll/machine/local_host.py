"""The settings and packages of the local machine that matter to a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plimsoll.machine.allocator import named_settings
from plimsoll.machine.heap import is_chosen, library
from plimsoll.machine.host import live_host, multiplies_bfloat16
from plimsoll.machine.nvidia import own_cards
from plimsoll.machine.versions import Package, installed_versions


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
