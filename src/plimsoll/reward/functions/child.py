"""The other end of children.py: a process that answers what it is asked."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

from plimsoll.reward.functions.calls import LENGTH, framed

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Opened = tuple[Callable[[Any], object], int | None]
"""What answers a question; and how many more bytes of memory it may take."""


def serve(open_: Callable[[Any], Opened]) -> None:
    """Answer until standard input is closed. open_: what the first message asks for.

    The loop consumes questions on standard input, waits for nothing else, is unblocked by each of
    them, and produces an answer to each on standard output. The kernel ends the process when its
    parent dies. What is printed goes to standard error.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    answer, more_bytes = open_(pickle.loads(_read(questions)))  # noqa: S301  from its parent
    _limit(more_bytes)
    _reply(replies, b"ready")
    while question := _read(questions):
        _reply(replies, pickle.dumps(answer(pickle.loads(question))))  # noqa: S301  the same


def _limit(more_bytes: int | None) -> None:
    """From here on, no more memory than this beside what the process has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if more_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(questions: BinaryIO) -> bytes:
    head = questions.read(LENGTH.size)
    return questions.read(LENGTH.unpack(head)[0]) if head else b""


def _reply(replies: BinaryIO, message: bytes) -> None:
    replies.write(framed(message))
    replies.flush()
