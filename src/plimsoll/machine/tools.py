"""What of the system's own packages is here: compilers, headers, libraries."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("gcc", "g++", "ninja", "nvcc")
LIBNUMA = "libnuma.so.1"
FOR_CPU_ADAM = ("g++", "ninja", "Python.h")
"""DeepSpeed compiles its Adam for the CPU at its first use."""

FOR_ZERO_PLUS_PLUS = ("nvcc", "g++", "ninja", "Python.h")
"""DeepSpeed compiles ZeRO++'s kernels at their first use."""

FOR_CPU_ENGINES = ("g++", "Python.h", LIBNUMA)
"""vLLM's build for CPUs links against libnuma, and compiles its sampler by torch.compile."""

FOR_TRITON = ("gcc", "Python.h")
"""Triton compiles its way into the driver at its first use (backends/nvidia/driver.py)."""

DEBIAN = {
    "gcc": "gcc",
    "g++": "g++",
    "ninja": "ninja-build",
    "Python.h": "python3-dev",
    LIBNUMA: "libnuma1",
}
"""The packages that have them. Debian's nvcc is of an older CUDA than torch's, which DeepSpeed
refuses."""


def system_tools() -> dict[str, str | None]:
    """Where each of COMPILERS, Python.h and LIBNUMA is; None where it is not."""
    found = {tool: _find(tool) for tool in COMPILERS}
    return found | {"Python.h": _headers(), LIBNUMA: _library(LIBNUMA)}


def way_to_have(missing: Sequence[str]) -> str:
    """What to do on Debian for tools that are not there."""
    packages = [DEBIAN[tool] for tool in missing if tool in DEBIAN]
    steps = [f"apt install {' '.join(packages)}"] if packages else []
    if "nvcc" in missing:
        steps.append("set CUDA_HOME to a CUDA kit of torch's own version")
    return " and ".join(steps)


def own_scripts() -> str:
    """Where this Python's packages put their commands, which need not be on the PATH."""
    return sysconfig.get_path("scripts")


def _find(tool: str) -> str | None:
    """Where those look that need it: of gcc Triton (runtime/build.py), of g++ torch
    (_inductor/config.py); of nvcc also where CUDA_HOME or the usual place has it."""
    match tool:
        case "gcc":
            return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        case "g++":
            return shutil.which((os.environ.get("CXX") or "g++").split()[0])
        case "ninja":
            return shutil.which(tool) or shutil.which(tool, path=own_scripts())
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(tool) or shutil.which(tool, path=f"{home}/bin")


def _headers() -> str | None:
    header = Path(sysconfig.get_path("include"), "Python.h")
    return str(header) if header.is_file() else None


def _library(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name
