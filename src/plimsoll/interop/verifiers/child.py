"""The process of verifiers' Python that plays episodes: `inside/player.py`, over lines of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from plimsoll.environment.agents.play import AgentResult
from plimsoll.environment.results import EnvironmentFailed
from plimsoll.errors import PlimsollError
from plimsoll.interop.verifiers import venv
from plimsoll.machine.meter import count_as_own
from plimsoll.reward.functions.children import ended_how, gone
from plimsoll.reward.outcome import Failed

_TASK = "task"
"""The column that has a task's data, as `plimsoll verifiers-tasks` writes it."""
_START_SECONDS = 300.0
_END_SECONDS = 10.0
"""How long a process may take to end, or to answer that an episode is given up."""
_LONGEST_LINE = 2**28

Line = Mapping[str, Any]


@dataclass
class _Running:
    """A started process."""

    process: Process
    results: dict[int, asyncio.Future[Line]] = field(default_factory=dict)
    """What became of each episode that is being played, by the episode's number."""
    over: bool = False
    """Whether the process has ended, or is about to."""

    def write(self, line: Line) -> None:
        assert self.process.stdin is not None
        if not self.over:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")

    async def read_lines(self) -> None:
        """Settle the episodes' results until the process has ended.

        The loop consumes the process's lines, waits for nothing else, and settles the result of
        the episode that each line names. The end of the process ends the loop, and fails all
        episodes that are left.
        """
        assert self.process.stdout is not None
        try:
            while text := await self.process.stdout.readline():
                line = json.loads(text)
                self._settle(line["episode"], line)
        except ValueError:  # a line beyond all bounds, or not JSON
            self.kill()
        self.over = True
        how = ended_how(await self.wait_for_end())
        for episode in self.results:
            self._settle(episode, {"failed": f"'s process {how}"})

    def _settle(self, episode: int, line: Line) -> None:
        result = self.results.get(episode)
        if result is not None and not result.done():
            result.set_result(line)

    async def give_up(self, episode: int) -> None:
        """End an episode. A process in which nothing moves is killed, with all its episodes."""
        self.write({"episode": episode, "close": True})
        done, _ = await asyncio.wait([self.results[episode]], timeout=_END_SECONDS)
        if not done:
            self.kill()

    async def wait_for_end(self) -> int:
        """Return the exit code. A process that does not end in time is killed."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    def kill(self) -> None:
        """Kill the process, and the tool servers that it started in sessions of their own."""
        self.over = True
        if self.process.returncode is not None:
            return
        with suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            for process in (*parent.children(recursive=True), parent):
                with suppress(psutil.Error):
                    process.kill()


class PlayerProcess:
    """Plays the episodes of one environment side by side, in one process.

    The process starts with the first episode, and anew with the next episode after it has ended.
    """

    def __init__(self, name: str, program: tuple[str, ...] = ()) -> None:
        """name: TASKSET, or ENVIRONMENT+TASKSET. program: the command; default: verifiers'."""
        self._name, self._program = name, program
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._running: _Running | None = None
        self._processes: list[Process] = []
        self._readers: set[asyncio.Task[None]] = set()

    async def play(
        self, row: Mapping[str, Any], *, base_url: str, api_key: str, **options: Any
    ) -> AgentResult:
        """Play an episode, whose turns the process asks from the endpoint at `base_url`.

        Raises EnvironmentFailed if the episode has no score, and PlimsollError if no process
        starts.
        """
        task = row.get(_TASK)
        if not isinstance(task, Mapping):
            said = f"'s rows need a column {_TASK}, as `plimsoll verifiers-tasks` writes it"
            raise EnvironmentFailed(Failed(said))
        async with self._starting:
            if self._running is None or self._running.over:
                self._running = await self._start(options)
            running = self._running
        episode, address = next(self._numbers), {"base_url": base_url, "api_key": api_key}
        result = running.results[episode] = asyncio.get_running_loop().create_future()
        running.write({"episode": episode, "task": task, **address})
        try:
            line = await asyncio.shield(result)
        except asyncio.CancelledError:
            await running.give_up(episode)
            raise
        finally:
            del running.results[episode]
        if "reward" not in line:
            raise EnvironmentFailed(Failed(line["failed"], line.get("lines", "")))
        return AgentResult(line["reward"], line["figures"])

    async def close(self) -> None:
        """End the process, with all that it has started."""
        running = self._running
        if running is not None and not running.over:
            assert running.process.stdin is not None
            running.process.stdin.close()
            await running.wait_for_end()
        await asyncio.gather(*map(gone, self._processes), *self._readers, return_exceptions=True)

    async def _start(self, options: Mapping[str, Any]) -> _Running:
        process = await asyncio.create_subprocess_exec(
            *(self._program or venv.player_command("play")),
            stdin=PIPE,
            stdout=PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self._processes.append(process)
        count_as_own(process.pid)
        running = _Running(process)
        try:
            running.write(venv.opening_line(self._name, options))
            async with asyncio.timeout(_START_SECONDS):
                assert process.stdout is not None
                text = await process.stdout.readline()
        except BaseException as error:
            running.kill()
            if not isinstance(error, OSError | TimeoutError):  # cancelled
                raise
            text = b""
        answer = json.loads(text) if text else {}
        if "ready" not in answer:
            running.kill()
            await gone(process)
            why = answer.get("refused") or ended_how(await process.wait())
            raise PlimsollError(
                f"The process for the environment {self._name} did not start: {why}"
            )
        reader = asyncio.create_task(running.read_lines())
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return running
