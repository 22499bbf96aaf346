"""Standard streams that nobody reads.

The reader has ended (`plimsoll ... | head -1`), the disk is full, or the process started without
the stream (`>&-`).
"""

from __future__ import annotations

import os
import sys

_STANDARD_ERROR = 2


def open_missing() -> None:
    """Open standard streams that this process started without on /dev/null.

    Otherwise the first files that it opens would get their numbers, and what libraries print would
    be written into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest place that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


def silence(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null, including what Python still has in its buffers."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tell(line: str) -> None:
    """Write a line to standard error at once, without Python's buffers.

    A signal handler may call this even while it interrupts print().
    """
    try:
        os.write(_STANDARD_ERROR, f"{line}\n".encode())
    except OSError:
        silence(_STANDARD_ERROR)
