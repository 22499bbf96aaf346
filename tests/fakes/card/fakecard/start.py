"""Give a process the card at the moment when it imports torch."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from fakecard.library import load_library

CARDS = tuple(uuid.uuid5(uuid.NAMESPACE_DNS, f"fakecard {number}") for number in range(4))
"""The UUIDs of the machine's cards, as torch writes them; NVML's have a `GPU-` before."""
CAPACITY = 80 << 30
"""The bytes of a card."""


class _TorchWithCard(MetaPathFinder):
    """Finds torch where it is, and puts the library before it and the replaced names behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec("torch") if fullname == "torch" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_with_card(module: ModuleType) -> None:
            has_card = load_library()
            execute(module)
            if has_card:
                from fakecard.install import install

                install()

        spec.loader.exec_module = execute_with_card  # type: ignore[method-assign]
        return spec


def give_card() -> None:
    """Let this process's torch have the card, and let NVML describe the machine's cards."""
    sys.meta_path.insert(0, _TorchWithCard())
    os.environ.setdefault("SAID_CARDS", json.dumps([*map(_for_nvml, range(len(CARDS)))]))


def _for_nvml(number: int) -> dict[str, str]:
    """Return a card as the fake NVML takes it: by the names of nvidia-smi's fields."""
    return {
        "index": str(number),
        "uuid": f"GPU-{CARDS[number]}",
        "name": "card of host memory",
        "memory.total": str(CAPACITY >> 20),
        "memory.reserved": "0",
        "memory.used": "0",
        "compute_cap": "9.0",
        "driver_version": "0",
        "mig.mode.current": "[N/A]",
    }
