"""Processes of our own that answer messages one at a time: whatever one does, the run goes on."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from plimsoll.errors import PlimsollError
from plimsoll.machine.meter import count_as_own
from plimsoll.reward.functions.calls import LENGTH, framed

_START_SECONDS = 300.0  # to import what is asked for may take long on a slow disk


class ChildEnded(Exception):
    """A process ended instead of answering; the text says how."""


class Child:
    """One that is asked by one caller alone."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.answers = True
        """False from a question on until its answer has come."""

    async def ask(self, question: object, seconds: float) -> Any:
        """Its answer. Raises TimeoutError, and ChildEnded."""
        self.answers = False
        try:
            async with asyncio.timeout(seconds):
                reply = await _told(self._process, pickle.dumps(question))
        except TimeoutError:  # which is an OSError
            raise
        except (OSError, EOFError) as error:
            raise ChildEnded(ended_how(await self._process.wait())) from error
        self.answers = True
        return pickle.loads(reply)  # noqa: S301  from our own process


class Children:
    """Processes that run a module, which serves by `child.serve`.

    They are started when they are needed, `size` of them at most; one that is left without its
    answer is killed, and one that has ended is replaced. what: they are for, in messages. setup:
    the first message to each.
    """

    def __init__(self, module: str, what: str, setup: object, size: int) -> None:
        self._module, self._what, self._setup = module, what, setup
        self._places: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._started_ones: list[Process] = []
        for _ in range(size):
            self._places.put_nowait(None)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Child]:
        """Within: a process for oneself. Raises PlimsollError where none can be started."""
        process, child = await self._places.get(), None
        try:
            process = process or await self._started()
            child = Child(process)
            yield child
        finally:
            kept = process if child is not None and child.answers else None
            if kept is None and process is not None:
                _kill(process)
            self._places.put_nowait(kept)

    async def close(self) -> None:
        """End all of them."""
        for process in self._started_ones:
            if process.returncode is None:
                _kill(process)
        await asyncio.gather(*map(gone, self._started_ones))

    async def _started(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the run; and to end what it starts itself
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self._started_ones.append(process)
        count_as_own(process.pid)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _told(process, pickle.dumps(self._setup))
        except BaseException as error:
            _kill(process)
            if not isinstance(error, OSError | EOFError | TimeoutError):  # cancelled
                raise
            raise PlimsollError(
                f"The process for the {self._what} did not start (code {await process.wait()}). "
                "Its own message is above."
            ) from error
        return process


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _told(process: Process, message: bytes) -> bytes:
    """Its reply. Raises OSError or EOFError where it has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(framed(message))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    return await process.stdout.readexactly(LENGTH.unpack(head)[0])


async def gone(process: Process) -> None:
    """Wait until it has ended, and its pipes are closed."""
    assert process.stdin is not None
    await process.wait()
    process.stdin.close()
    with suppress(OSError):
        await process.stdin.wait_closed()


def ended_how(code: int) -> str:
    """How a process of this exit code ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ": often the system's, when host memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
