"""A reward function in processes of its own: whatever it does to one, the run goes on."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from plimsoll.errors import PlimsollError
from plimsoll.machine.meter import count_as_own
from plimsoll.records import Trajectory
from plimsoll.reward.functions.calls import LENGTH, Setup, framed
from plimsoll.reward.outcome import Failed, Outcome

_START_SECONDS = 300.0  # to import what a function needs may take long on a slow disk


class ProcessPool:
    """Processes that each call a function for one list of trajectories at a time.

    They are started when they are needed, `size` of them at most. One that does not answer within
    the time limit is killed, and one that has ended is replaced.
    """

    def __init__(self, setup: Setup, time_limit: float, size: int) -> None:
        self._setup, self._time_limit = setup, time_limit
        self._places: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._started_ones: list[Process] = []
        for _ in range(size):
            self._places.put_nowait(None)

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """What the function gives, or failures where its process did not answer.

        Raises PlimsollError where no process can be started.
        """
        process, kept = await self._places.get(), None
        try:
            process = process or await self._started()
            found, alive = await self._asked(process, trajectories)
            kept = process if alive else None
        finally:
            if kept is None and process is not None:
                self._kill(process)
            self._places.put_nowait(kept)
        return found

    async def close(self) -> None:
        """End all of them."""
        for process in self._started_ones:
            if process.returncode is None:
                self._kill(process)
        await asyncio.gather(*map(_gone, self._started_ones))

    async def _asked(
        self, process: Process, trajectories: Sequence[Trajectory]
    ) -> tuple[Sequence[Outcome], bool]:
        """The answer, and whether the process can be asked again."""
        wanted = len(trajectories)
        try:
            async with asyncio.timeout(self._time_limit):
                reply = await _told(process, pickle.dumps([*trajectories]))
            found: list[Outcome] = pickle.loads(reply)  # noqa: S301  from our own process
        except TimeoutError:
            said = f" took longer than its time_limit of {self._time_limit:g} s; its process was "
            return [Failed(f"{said}ended")] * wanted, False
        except (OSError, EOFError):
            return [Failed(f"'s process {_end(await process.wait())}")] * wanted, False
        return found, True

    async def _started(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "plimsoll.reward.functions.worker"),
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
            self._kill(process)
            if not isinstance(error, OSError | EOFError | TimeoutError):  # cancelled
                raise
            raise PlimsollError(
                f"The process for the reward function {self._setup.name} did not start (code "
                f"{await process.wait()}). Its own message is above."
            ) from error
        return process

    def _kill(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _told(process: Process, message: bytes) -> bytes:
    """Its reply. Raises OSError or EOFError where it has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(framed(message))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    return await process.stdout.readexactly(LENGTH.unpack(head)[0])


async def _gone(process: Process) -> None:
    """Wait until it has ended, and its pipes are closed."""
    assert process.stdin is not None
    await process.wait()
    process.stdin.close()
    with suppress(OSError):
        await process.stdin.wait_closed()


def _end(code: int) -> str:
    """How it ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ": often the system's, when host memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
