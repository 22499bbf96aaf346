"""A process that calls one reward function; started by processes.py.

Its loop consumes lists of trajectories on standard input, waits for nothing else, is unblocked by
each of them, and produces a list of outcomes for each on standard output. It ends when its input is
closed; the kernel ends it when its parent dies. What the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import resource
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO

from plimsoll.config.base import Choice
from plimsoll.config.choice import resolve_choice
from plimsoll.records import Trajectory
from plimsoll.reward.functions.calls import LENGTH, Setup, awaited, called, framed, is_coroutine
from plimsoll.reward.outcome import Outcome
from plimsoll.reward.references import REWARDS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Answer until standard input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup: Setup = pickle.loads(_read(questions))  # noqa: S301  from its parent
    choice = Choice(name=setup.name, options=dict(setup.options))
    function = resolve_choice(choice, REWARDS, "reward", awaited=True)
    _limit(setup.memory_bytes)
    _reply(replies, b"ready")
    while question := _read(questions):
        trajectories: Sequence[Trajectory] = pickle.loads(question)  # noqa: S301  from its parent
        _reply(replies, pickle.dumps(_answer(function, trajectories, setup.batch)))


def _answer(
    function: partial[Any], trajectories: Sequence[Trajectory], batch: bool
) -> list[Outcome]:
    if is_coroutine(function):
        return asyncio.run(awaited(function, trajectories, batch))
    return called(function, trajectories, batch)


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


if __name__ == "__main__":
    main()
