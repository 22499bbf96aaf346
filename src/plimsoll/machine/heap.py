"""Run processes that train on CPU with the heap jemalloc, which Ray's wheel for Linux contains.

glibc's heap keeps what tensors free, and before 2.39 cannot reuse what it cut off a block to align
it (its bug 30723); docs/performance.md has figures. The environment chooses the heap before a
process begins, so this happens below torch.
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
"""jemalloc's settings. A background thread frees blocks that were unused for a second (jemalloc(3),
TUNING). Blocks of more than 8 MiB are not freed at once, because the next layer needs them again.
"""

_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL of jemalloc 5

_HEAPS = ("jemalloc", "tcmalloc", "mimalloc")
_NVIDIA = Path("/dev/nvidiactl")
_ORIGINAL = "PLIMSOLL_LD_PRELOAD"
"""The variable with the value of LD_PRELOAD before the restart. Child processes get that value."""


def library() -> Path | None:
    """Return the path of jemalloc's library in Ray's wheel; None if it cannot be used.

    It cannot be used on systems other than Linux, if Ray came without it, or if its path has a
    space or a colon: these separate the entries of LD_PRELOAD.
    """
    ray = importlib.util.find_spec("ray")
    if sys.platform != "linux" or ray is None or ray.origin is None:
        return None
    path = Path(ray.origin).parent / "core" / "libjemalloc.so"
    return path if path.is_file() and not set(" :") & set(str(path)) else None


def is_chosen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether LD_PRELOAD names a heap: jemalloc, tcmalloc or mimalloc."""
    return any(heap in environment.get("LD_PRELOAD", "") for heap in _HEAPS)


def preload_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that give a new process jemalloc as its heap.

    The result is empty if jemalloc cannot be used, or if LD_PRELOAD already names a heap.
    """
    preloaded, jemalloc = environment.get("LD_PRELOAD", ""), library()
    if jemalloc is None or is_chosen(environment):
        return {}
    settings = environment.get("MALLOC_CONF", SETTINGS)
    return {"LD_PRELOAD": f"{jemalloc}:{preloaded}".rstrip(":"), "MALLOC_CONF": settings}


def restart_with_jemalloc() -> None:
    """Restart this process with the same command line and jemalloc as its heap.

    Return without a restart if the process already has jemalloc, if `preload_settings` is empty, if
    this machine has NVIDIA's driver (tensors are then not in the heap), or if a debugger would lose
    the process.
    """
    original = os.environ.pop(_ORIGINAL, None)
    if original is not None:
        del os.environ["LD_PRELOAD"]
        if original:
            os.environ["LD_PRELOAD"] = original
        return
    needed = preload_settings()
    is_debugged = sys.gettrace() is not None or "debugpy" in sys.modules
    if needed and not _NVIDIA.exists() and not is_debugged:
        mark = {_ORIGINAL: os.environ.get("LD_PRELOAD", "")}
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | needed | mark)


def keep_large_blocks() -> None:
    """Apply SETTINGS on large blocks to the first thread's arena, if jemalloc is in use.

    jemalloc 5.3 makes that arena before it reads its settings.
    """
    mallctl = _mallctl()
    if mallctl is not None:
        value = ctypes.c_size_t(_NEVER)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        mallctl(b"arena.0.oversize_threshold", None, None, ctypes.byref(value), size)


def release_free_blocks() -> None:
    """Return the unused memory of jemalloc to the system now; do nothing with another heap."""
    mallctl = _mallctl()
    if mallctl is not None:
        mallctl(b"arena.%d.purge" % _ALL_ARENAS, None, None, None, ctypes.c_size_t(0))


def _mallctl() -> Any:
    return getattr(ctypes.CDLL(None), "mallctl", None)
