"""Output that leads nowhere: its reader has gone (`plimsoll ... | head -1`), its disk is full, or
the process began without it (`>&-`)."""

from __future__ import annotations

import os
import sys

_STANDARD_ERROR = 2


def open_missing() -> None:
    """Have standard streams that this process began without lead nowhere. The first files that it
    opens would take their places, and what libraries print would be written into them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest place that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


def silence(descriptor: int) -> None:
    """Send what is still written there to nowhere, what lies in Python's buffers too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tell(line: str) -> None:
    """Write a line to standard error at once, past Python's buffers: a signal handler may, while
    print() is at work in the code that it interrupted."""
    try:
        os.write(_STANDARD_ERROR, f"{line}\n".encode())
    except OSError:
        silence(_STANDARD_ERROR)
