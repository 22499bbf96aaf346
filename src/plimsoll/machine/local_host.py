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
    """The allocator settings of the environment; see `named_settings`."""
    versions: Mapping[str, str]
    """The versions of the installed packages among those that matter."""
    free_bytes: tuple[int, ...]
    """The free bytes of each GPU that a run would see, or of the host if the GPU shares its memory.
    """
    jemalloc: bool
    """Whether a process here begins with jemalloc, or with another heap that LD_PRELOAD names."""
    bfloat16: bool
    """Whether the CPU multiplies bfloat16."""


def read_local_host(packages: Iterable[Package]) -> LocalHost:
    """Return what this process finds, with the versions of packages; errors as `own_cards`."""
    versions = installed_versions(packages)
    cards = own_cards()
    return LocalHost(
        named_settings(),
        {name: version for name, version in versions.items() if version is not None},
        tuple(c.free_bytes if c.total_bytes else live_host().free_bytes for c in cards),
        jemalloc=library() is not None or is_chosen(),
        bfloat16=multiplies_bfloat16(),
    )
