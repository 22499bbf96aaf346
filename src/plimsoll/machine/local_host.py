"""What a run would meet on the machine at hand, beside its hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.machine.allocator import named_settings
from plimsoll.machine.cpu import multiplies_bfloat16
from plimsoll.machine.heap import is_chosen, library
from plimsoll.machine.host import live_host
from plimsoll.machine.nvidia import own_cards
from plimsoll.machine.versions import PACKAGES, installed_version


@dataclass(frozen=True)
class LocalHost:
    """allocator: as `named_settings` reads it. versions: of the installed
    packages among `versions.PACKAGES`. free_bytes: of each GPU that a run would see; of one that
    shares the host's memory, of that. jemalloc: whether a process here can begin with it, or with
    another heap that LD_PRELOAD names. bfloat16: whether the CPU multiplies bfloat16.
    """

    allocator: str
    versions: Mapping[str, str]
    free_bytes: tuple[int, ...]
    jemalloc: bool
    bfloat16: bool


def read_local_host() -> LocalHost:
    """As this process finds them. Raises PlimsollError when NVIDIA's driver is there and fails."""
    found = {package.name: installed_version(package.name) for package in PACKAGES}
    cards = own_cards()
    return LocalHost(
        named_settings(),
        {name: version for name, version in found.items() if version is not None},
        tuple(c.free_bytes if c.total_bytes else live_host().free_bytes for c in cards),
        jemalloc=library() is not None or is_chosen(),
        bfloat16=multiplies_bfloat16(),
    )
