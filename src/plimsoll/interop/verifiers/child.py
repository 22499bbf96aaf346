"""Start and call the process in verifiers' Python that plays episodes (`inside/player.py`)."""

from __future__ import annotations

import asyncio
import json
import secrets
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import psutil

from plimsoll.environment.agents.play import AgentResult
from plimsoll.environment.results import EnvironmentFailed
from plimsoll.errors import PlimsollError
from plimsoll.interop.verifiers import venv
from plimsoll.machine.meter import count_as_own
from plimsoll.process.child import describe_exit
from plimsoll.reward.outcome import Failed

_TASK = "task"
"""The column with a task's data, which `plimsoll verifiers-tasks` writes."""
_START_SECONDS = 300.0
_END_SECONDS = 10.0
"""The most seconds that a process may take to end, or to show that it still answers."""


class PlayerProcess:
    """Plays the episodes of one environment concurrently, in one process.

    The process starts with the first episode. If it has ended, the next episode starts a new one.

    Args:
        name: TASKSET, or ENVIRONMENT+TASKSET.
        program: The command that starts the process; by default the player in verifiers' Python.
    """

    def __init__(self, name: str, program: tuple[str, ...] = ()) -> None:
        self._name, self._program = name, program
        self._starting = asyncio.Lock()
        self._running: tuple[Process, httpx.AsyncClient] | None = None

    async def play(
        self, row: Mapping[str, Any], *, base_url: str, api_key: str, **options: Any
    ) -> AgentResult:
        """Play an episode; return its reward and figures.

        Args:
            row: The row; its column `task` has the task's data.
            base_url: The endpoint that the process asks for the policy's turns.
            api_key: The key of the endpoint.
            options: Keys of the environment's config.

        Raises EnvironmentFailed if the episode has no score, and PlimsollError if no process
        starts.
        """
        task = row.get(_TASK)
        if not isinstance(task, Mapping):
            why = f"'s rows need a column {_TASK}, as `plimsoll verifiers-tasks` writes it"
            raise EnvironmentFailed(Failed(why))
        async with self._starting:
            if self._running is None or self._running[0].returncode is not None:
                await self.close()
                self._running = await self._start(options)
        process, player = self._running
        body = {"task": task, "base_url": base_url, "api_key": api_key}
        try:
            answer = (await player.post("/play", json=body)).json()
        except asyncio.CancelledError:
            await _kill_if_stuck(process, player)
            raise
        except (httpx.HTTPError, ValueError):
            how = describe_exit(await _wait_for_end(process))
            raise EnvironmentFailed(Failed(f"'s process {how}")) from None
        if "reward" not in answer:
            raise EnvironmentFailed(Failed(answer["failed"], answer.get("lines", "")))
        return AgentResult(answer["reward"], answer["figures"])

    async def close(self) -> None:
        """End the process and the processes that it has started; do nothing if none runs."""
        if self._running is not None:
            process, player = self._running
            assert process.stdin is not None
            process.stdin.close()
            await _wait_for_end(process)
            await _close_pipes(process)
            await player.aclose()

    async def _start(self, options: Mapping[str, Any]) -> tuple[Process, httpx.AsyncClient]:
        """Start a process; return it when it is ready, with an HTTP client for it.

        Raises PlimsollError if it does not start.
        """
        token = secrets.token_urlsafe(24)
        process = await asyncio.create_subprocess_exec(
            *(self._program or venv.player_command("play")),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the run
        )
        count_as_own(process.pid)
        assert process.stdin is not None and process.stdout is not None
        try:
            opening = venv.opening_line(self._name, options) | {"token": token}
            process.stdin.write(json.dumps(opening).encode() + b"\n")
            async with asyncio.timeout(_START_SECONDS):
                text = await process.stdout.readline()
        except BaseException as error:
            _kill(process)
            if not isinstance(error, OSError | TimeoutError):  # cancelled
                raise
            text = b""
        answer = json.loads(text) if text else {}
        if "ready" not in answer:
            why = answer.get("refused") or describe_exit(await _wait_for_end(process))
            _kill(process)
            await _close_pipes(process)
            raise PlimsollError(
                f"The process for the environment {self._name} did not start: {why}"
            )
        url = f"http://127.0.0.1:{answer['port']}"
        limits = httpx.Limits(max_connections=None)
        key = {"Authorization": f"Bearer {token}"}
        return process, httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=key)


async def _close_pipes(process: Process) -> None:
    """Wait until a process has ended, and close its standard input."""
    assert process.stdin is not None
    await process.wait()
    process.stdin.close()
    with suppress(OSError):
        await process.stdin.wait_closed()


async def _kill_if_stuck(process: Process, player: httpx.AsyncClient) -> None:
    """Kill a process that does not answer; all its episodes are lost."""
    try:
        await player.get("/", timeout=_END_SECONDS)
    except httpx.HTTPError:
        _kill(process)
        await process.wait()


async def _wait_for_end(process: Process) -> int:
    """Wait for a process to end, and return its exit code; kill it after `_END_SECONDS`."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            return await process.wait()
    except TimeoutError:
        _kill(process)
        return await process.wait()


def _kill(process: Process) -> None:
    """Kill a process and its children, such as tool servers in other sessions."""
    with suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        for member in (*parent.children(recursive=True), parent):
            with suppress(psutil.Error):
                member.kill()
