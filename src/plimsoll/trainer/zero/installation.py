"""DeepSpeed's installation: known faults of versions, and parts compiled at their first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from plimsoll.config.problems import Problem
from plimsoll.machine.versions import Failure, Package, package_finding
from plimsoll.resolve.engine_rules import Compiled, Installed

DEEPSPEED = Package(
    "deepspeed",
    partial=(
        Failure(
            "<0.16.8",
            "Qwen3 under ZeRO-3 took so much more memory that 8B did not fit 8 H100.",
            "huggingface/open-r1#653, deepspeedai/DeepSpeed#7258",
        ),
    ),
)
PACKAGES = (DEEPSPEED,)

FOR_CPU_ADAM = ("g++", "ninja", "Python.h")
FOR_ZERO_PLUS_PLUS = ("nvcc", *FOR_CPU_ADAM)
COMPILED = (
    Compiled("Adam on the CPU (optimizer_offload)", FOR_CPU_ADAM, ("cpu", "cuda")),
    Compiled("ZeRO++ (quantized_weights, quantized_gradients)", FOR_ZERO_PLUS_PLUS, ("cuda",)),
)


def is_adam_built() -> bool:
    """Return whether DeepSpeed was installed with its Adam compiled (DS_BUILD_CPU_ADAM)."""
    deepspeed = importlib.util.find_spec("deepspeed")
    if deepspeed is None or deepspeed.origin is None:
        return False
    return any(Path(deepspeed.origin).parent.glob("ops/adam/cpu_adam_op*.so"))


def find_installed(seen: Installed) -> Iterator[Problem]:
    """Yield `plimsoll doctor`'s finding about DeepSpeed, which each run needs by default."""
    yield package_finding(DEEPSPEED, seen.versions[DEEPSPEED.name])
