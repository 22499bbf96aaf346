"""The child's side: answer the parent's messages, one at a time; child.py is the parent's side.

`python -m plimsoll.process.serve CODEC MODULE FUNCTION`: FUNCTION of MODULE takes the first message
and returns the function that answers all later messages. CODEC encodes each message as one line.
This module imports only the standard library, because it runs in the sandbox.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

from plimsoll.errors import PlimsollError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Responder = Callable[[Any], object]


class Pickles:
    """Encode messages, which may hold any object, as pickles of one line each.

    A pickle can run code when it is read. So this codec is only for children that run the user's
    code, which is trusted here, too. A policy's programs never answer in pickles.
    """

    @staticmethod
    def dumps(value: object) -> str:
        """Return a value, pickled, as one line of base64."""
        return b64encode(pickle.dumps(value)).decode()

    @staticmethod
    def loads(line: str | bytes) -> Any:
        """Return the value in a line from `dumps`."""
        return pickle.loads(b64decode(line))  # noqa: S301  from the user's own code


CODECS: Mapping[str, Any] = {"json": json, "pickle": Pickles}
"""The codecs of messages by their names; `dumps` and `loads` encode and decode one."""


def serve(codec: Any, open_: Callable[[Any], Responder]) -> None:
    """Answer the messages on standard input until it is closed.

    The loop consumes messages on standard input, waits for nothing else, is unblocked by each of
    them, and produces an answer to each on standard output. What is printed goes to standard
    error. The kernel ends the process when the parent dies.

    Args:
        codec: One of `CODECS`.
        open_: Takes the setup and returns the function that answers messages. It raises
            PlimsollError to refuse the setup.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    messages, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(value: object) -> None:
        replies.write(codec.dumps(value).encode() + b"\n")
        replies.flush()

    first = codec.loads(messages.readline())
    try:
        answer = open_(first["setup"])
    except PlimsollError as error:
        reply(str(error))
        return
    _limit_memory(first["memory_gib"])
    reply(None)
    for line in messages:
        message = codec.loads(line)
        signal.setitimer(signal.ITIMER_PROF, first["cpu_seconds"] or 0)  # ended by SIGPROF
        value = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(value)


def _limit_memory(more_gib: float | None) -> None:
    """Limit this process's address space to its present size and `more_gib`; None: no limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if more_gib is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + int(more_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _, codec, module, function = sys.argv
    serve(CODECS[codec], getattr(importlib.import_module(module), function))
