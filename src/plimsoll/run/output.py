"""Output whose reader may have gone, as the one of `plimsoll ... | head -1` has."""

from __future__ import annotations

import os

_STANDARD_ERROR = 2


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
    except BrokenPipeError:
        silence(_STANDARD_ERROR)
