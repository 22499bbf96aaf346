"""The child's side: answer the parent's messages, one at a time. child.py is the parent's side.

As a program: `python -m plimsoll.process.serve json|pickle MODULE FUNCTION`, where the function
takes the first message and returns the function that answers all later ones.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.process.frames import JSON, Codec, frame, read_frame

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Answer = Callable[[Any], object]


def serve(open_: Callable[[Any], Answer], codec: Codec) -> None:
    """Answer messages until standard input is closed.

    The loop consumes messages on standard input, waits for nothing else, is unblocked by each of
    them, and produces an answer to each on standard output. What is printed goes to standard
    error. The kernel ends the process when the parent dies.

    Args:
        open_: Takes the setup and returns what answers messages; raises PlimsollError to refuse.
        codec: How messages are written.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    messages, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(value: object) -> None:
        replies.write(frame(codec.dumps(value)))
        replies.flush()

    first = codec.loads(read_frame(messages.read))
    try:
        answer = open_(first["setup"])
    except PlimsollError as error:
        reply(str(error))
        return
    _limit_memory(first["memory_bytes"])
    reply(None)
    while messages.peek(1):
        message = codec.loads(read_frame(messages.read))
        signal.setitimer(signal.ITIMER_PROF, first["cpu_seconds"] or 0)  # ended by SIGPROF
        value = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(value)


def _limit_memory(more_bytes: int | None) -> None:
    """Let this process take no more than so many bytes beyond what it has now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if more_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(codec: str, module: str, function: str) -> None:
    """Serve by a function of a module."""
    if codec == "pickle":  # a tenth of the start
        from plimsoll.process.pickled import PICKLE

        serve(getattr(importlib.import_module(module), function), PICKLE)
    else:
        serve(getattr(importlib.import_module(module), function), JSON)


if __name__ == "__main__":
    main(*sys.argv[1:])
