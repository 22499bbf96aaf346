"""Read the CPU's instructions, which decide in which dtype it computes fast."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}
"""Flags in /proc/cpuinfo of instructions that multiply bfloat16: two on x86, two on ARM."""

_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The variable that keeps oneDNN, which computes matrix products, from newer instructions."""

_LIMITS_WITH_BFLOAT16 = {"ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}
"""Values of that variable that allow the instructions of `_BFLOAT16_FLAGS`, beside all values with
AMX in them (oneDNN's documentation, "CPU Dispatcher Control").
"""


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for matrix products in bfloat16.

    Without them a product in bfloat16 takes six to twelve times as long as one in float32
    (docs/performance.md). False also if `ONEDNN_MAX_CPU_ISA` excludes the instructions.
    """
    limit = os.environ.get(_LIMIT, "ALL").upper()
    allowed = limit in _LIMITS_WITH_BFLOAT16 or "AMX" in limit
    return allowed and bool(_BFLOAT16_FLAGS & cpu_flags())


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; none if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    entries = (line.partition(":") for line in lines)
    flags = next((text for key, _, text in entries if key.strip() in ("flags", "Features")), "")
    return frozenset(flags.split())
