"""The process that plays an environment's episodes: `inside/player.py`, run by verifiers' Python.

It is told and tells lines of JSON, each of one episode, as that file says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from plimsoll.environment.verifiers import venv
from plimsoll.errors import PlimsollError
from plimsoll.machine.meter import count_as_own
from plimsoll.process.child import describe_exit

_START_SECONDS = 300.0
_END_SECONDS = 10.0
"""For a process that is asked to end, or whether it still listens."""
_LONGEST_LINE = 2**28

Message = Mapping[str, Any]


async def gone(process: Process) -> None:
    """Wait until a process has ended, and its pipes are closed."""
    assert process.stdin is not None
    await process.wait()
    process.stdin.close()
    with suppress(OSError):
        await process.stdin.wait_closed()


@dataclass
class _Running:
    """A process, and the episodes that it plays. heard: by their numbers, what it has said of each.
    over: it has ended, or is about to."""

    process: Process
    heard: dict[int, asyncio.Queue[Message]] = field(default_factory=dict)
    pongs: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    over: bool = False

    def say(self, message: Message) -> None:
        """Write a line; to a process that is over, nothing."""
        assert self.process.stdin is not None
        if not self.over:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def listen(self) -> None:
        """A loop that consumes the process's lines, waits for nothing else, and gives each to its
        episode. It is over when the process has ended, which all episodes are then told."""
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                message = json.loads(line)
                if "pong" in message:
                    self.pongs.put_nowait(message)
                elif message["episode"] in self.heard:
                    self.heard[message["episode"]].put_nowait(message)
        except ValueError:  # a line beyond all bounds, or none of JSON
            self.end()
        self.over = True
        how = describe_exit(await self.ends())
        for queue in self.heard.values():
            queue.put_nowait({"failed": f"'s process {how}"})

    async def ends(self) -> int:
        """Its exit code, once it has ended; one that does not is killed."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                return await self.process.wait()
        except TimeoutError:
            self.end()
            return await self.process.wait()

    def end(self) -> None:
        """Kill it, with the tool servers that it started, which have sessions of their own."""
        self.over = True
        if self.process.returncode is not None:
            return
        with suppress(psutil.Error):
            whole = psutil.Process(self.process.pid)
            for one in (*whole.children(recursive=True), whole):
                with suppress(psutil.Error):
                    one.kill()


@dataclass(frozen=True)
class Episode:
    """One that is being played."""

    number: int
    running: _Running

    async def heard(self) -> Message:
        """What is said of it next."""
        return await self.running.heard[self.number].get()

    def say(self, message: Message) -> None:
        self.running.say({"episode": self.number, **message})

    async def end_if_deaf(self) -> bool:
        """End the process where nothing moves in it, which costs all of its episodes; whether that
        was so."""
        self.running.say({"ping": self.number})
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.running.pongs.get()
        except TimeoutError:
            self.running.end()
            return True
        return False

    def close(self) -> None:
        """Give it up, if it is not over."""
        del self.running.heard[self.number]
        self.say({"close": True})


class VerifiersProcess:
    """One for an environment of a run; started when an episode needs it, and again after it has
    ended. command: its program. setup: the first line that it is told."""

    def __init__(self, name: str, command: Sequence[str], setup: Message) -> None:
        self._name, self._command, self._setup = name, command, setup
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._running: _Running | None = None
        self._processes: list[Process] = []
        self._listening: set[asyncio.Task[None]] = set()

    async def begin(self, task: Message) -> Episode:
        """Begin an episode. task: its data. Raises PlimsollError where no process starts."""
        async with self._starting:
            if self._running is None or self._running.over:
                self._running = await self._started()
            running = self._running
        episode = Episode(next(self._numbers), running)
        running.heard[episode.number] = asyncio.Queue()
        episode.say({"task": task})
        return episode

    async def close(self) -> None:
        """End it, with all that it has started."""
        running = self._running
        if running is not None and not running.over:
            assert running.process.stdin is not None
            running.process.stdin.close()
            await running.ends()
        await asyncio.gather(*map(gone, self._processes), *self._listening, return_exceptions=True)

    async def _started(self) -> _Running:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self._processes.append(process)
        count_as_own(process.pid)
        running = _Running(process)
        try:
            running.say(self._setup)
            async with asyncio.timeout(_START_SECONDS):
                assert process.stdout is not None
                line = await process.stdout.readline()
        except BaseException as error:
            running.end()
            if not isinstance(error, OSError | TimeoutError):  # cancelled
                raise
            line = b""
        found = json.loads(line) if line else {}
        if "ready" not in found:
            running.end()
            await gone(process)
            why = found.get("refused") or describe_exit(await process.wait())
            raise PlimsollError(
                f"The process for the environment {self._name} did not start: {why}"
            )
        listening = asyncio.create_task(running.listen())
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)
        return running


@dataclass(frozen=True)
class VerifiersEnvironment:
    """What `verifiers:NAME` names. name: TASKSET, or ENVIRONMENT+TASKSET."""

    name: str

    def check(self, options: Mapping[str, Any]) -> None:
        """Have verifiers open it. Raises ConfigError for what it says against it."""
        venv.check(self.name, dict(options))

    def process(self, options: Mapping[str, Any]) -> VerifiersProcess:
        """The process that will play it."""
        setup = venv.setup_of(self.name, dict(options))
        return VerifiersProcess(self.name, venv.player_command("play"), setup)
