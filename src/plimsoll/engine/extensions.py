"""DeepSpeed's parts in C++, which a machine compiles at their first use."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from plimsoll.errors import PlimsollError

# On a machine with nvcc and no GPU it tells whoever imports it so.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

MOST_SECONDS = 600.0
"""That compiling may take; it takes about one minute."""


def await_build(name: str) -> None:
    """Wait while another process compiles the extension. Torch does so too, but it would wait for
    ever for one that was killed.

    Raises PlimsollError where the other's lock is older than compiling takes.
    """
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False), "lock")
    while (age := _age(lock)) is not None:
        if age > MOST_SECONDS:
            raise PlimsollError(
                f"{lock} has been there for {age / 60:.0f} minutes: a process that compiled "
                f"DeepSpeed's {name} was probably killed, and left it. If no other run on this "
                "machine is starting just now, remove the file and try again"
            )
        time.sleep(1.0)


def _age(file: Path) -> float | None:
    """Seconds since the file was made; None where there is none."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None
