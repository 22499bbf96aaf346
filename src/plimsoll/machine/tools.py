"""Find the system's own tools that a run needs: compilers, headers, libraries."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("gcc", "g++", "ninja", "nvcc")
LIBNUMA = "libnuma.so.1"
FOR_TRITON = ("gcc", "Python.h")
"""Triton compiles its launcher at its first use (backends/nvidia/driver.py)."""

DEBIAN = {
    "gcc": "gcc",
    "g++": "g++",
    "ninja": "ninja-build",
    "Python.h": "python3-dev",
    LIBNUMA: "libnuma1",
}
"""Debian's package for each tool. nvcc is missing: Debian's is of an older CUDA than torch's, which
DeepSpeed refuses.
"""


def system_tools() -> dict[str, str | None]:
    """Return the path of each of COMPILERS, Python.h and LIBNUMA; None if it is missing."""
    places = {tool: _find(tool) for tool in COMPILERS}
    return places | {"Python.h": _headers(), LIBNUMA: _library(LIBNUMA)}


def how_to_install(missing: Sequence[str]) -> str:
    """Return a phrase on how to install the missing tools on Debian."""
    packages = [DEBIAN[tool] for tool in missing if tool in DEBIAN]
    steps = [f"apt install {' '.join(packages)}"] if packages else []
    if "nvcc" in missing:
        steps.append("set CUDA_HOME to a CUDA kit of torch's own version")
    return " and ".join(steps)


def own_scripts() -> str:
    """Return the folder with the commands of this Python's packages. PATH may lack it."""
    return sysconfig.get_path("scripts")


def _find(tool: str) -> str | None:
    """Return the path of a tool, or None; the search is that of the library that needs the tool.

    Triton needs gcc (runtime/build.py), and torch needs g++ (_inductor/config.py). nvcc may also be
    in CUDA_HOME or in /usr/local/cuda.
    """
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
