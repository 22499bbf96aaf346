"""The heap of a process that trains on CPU: jemalloc, of which Ray's wheel for Linux has a copy.

glibc's own keeps what tensors give back, and before 2.39 it cannot use again what it cut off a
block to align it (its bug 30723): SFT of 28M parameters took 2.02 GB with it and takes 1.50, in the
same time, and with glibc's more at every step.

A heap is chosen before a process begins, by its environment, and so below torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NEVER = 2**40
SETTINGS = (
    f"background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0,oversize_threshold:{_NEVER}"
)
"""A thread of its own gives back what has been free for a second (jemalloc(3), TUNING). Blocks
of more than 8 MiB are not given back at once: the next layer would ask for them again."""

_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL of jemalloc 5

_HEAPS = ("jemalloc", "tcmalloc", "mimalloc")
_NVIDIA = Path("/dev/nvidiactl")
_BEFORE = "PLIMSOLL_LD_PRELOAD"
"""What LD_PRELOAD was before this process began anew; its children go by that."""


def library() -> Path | None:
    """jemalloc's file; None on other systems than Linux, where Ray came without it, and where its
    path has a space or colon, at which LD_PRELOAD is divided."""
    ray = importlib.util.find_spec("ray")
    if sys.platform != "linux" or ray is None or ray.origin is None:
        return None
    path = Path(ray.origin).parent / "core" / "libjemalloc.so"
    return path if path.is_file() and not set(" :") & set(str(path)) else None


def is_chosen(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether LD_PRELOAD names a heap already."""
    return any(heap in environment.get("LD_PRELOAD", "") for heap in _HEAPS)


def preloading(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the environment of a process needs besides, to begin with jemalloc: nothing where there
    is none, or where one is chosen.
    """
    before, found = environment.get("LD_PRELOAD", ""), library()
    if found is None or is_chosen(environment):
        return {}
    settings = environment.get("MALLOC_CONF", SETTINGS)
    return {"LD_PRELOAD": f"{found}:{before}".rstrip(":"), "MALLOC_CONF": settings}


def begin_anew() -> None:
    """Run this process's own command line once more, in its place, with jemalloc.

    Does not return, unless the process already has what `preloading` gives, that is nothing, this
    machine has NVIDIA's driver (what is trained there does not live in the heap), or a debugger
    would lose the process.
    """
    before = os.environ.pop(_BEFORE, None)
    if before is not None:
        del os.environ["LD_PRELOAD"]
        if before:
            os.environ["LD_PRELOAD"] = before
        return
    needed = preloading()
    if needed and not _NVIDIA.exists() and not _is_debugged():
        mark = {_BEFORE: os.environ.get("LD_PRELOAD", "")}
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | needed | mark)


def keep_large_blocks() -> None:
    """What SETTINGS say of large blocks, for the arena that jemalloc 5.3 makes before it reads
    them, of the process's first thread. Nothing where another heap is at work."""
    control = _control()
    if control is not None:
        value = ctypes.c_size_t(_NEVER)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        control(b"arena.0.oversize_threshold", None, None, ctypes.byref(value), size)


def release_free_blocks() -> None:
    """Give back at once what all arenas of jemalloc keep for a second. Nothing where another heap
    is at work."""
    control = _control()
    if control is not None:
        control(b"arena.%d.purge" % _ALL_ARENAS, None, None, None, ctypes.c_size_t(0))


def _control() -> Any:
    """jemalloc's mallctl(3); None where another heap is at work."""
    return getattr(ctypes.CDLL(None), "mallctl", None)


def _is_debugged() -> bool:
    return sys.gettrace() is not None or "debugpy" in sys.modules
