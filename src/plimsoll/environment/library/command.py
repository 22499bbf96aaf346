"""An agent as a command, which starts once for each episode."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.reward.outcome import finite, shown

_LINES = 20
"""The last lines of a failed command's errors that are shown."""


async def command(
    row: Mapping[str, Any], base_url: str, api_key: str, *, command: str
) -> float | None:
    """Run a command for an episode; return the reward that it writes, if any.

    The command finds the policy as OpenAI's clients do, by OPENAI_BASE_URL and OPENAI_API_KEY, and
    reads the row as one line of JSON from its standard input. The last line that it writes may be
    `{"reward": 1.0}`. Raises PlimsollError if it ends with another exit code than 0.

    Args:
        row: what the episode is about.
        base_url: the policy's endpoint.
        api_key: the episode's key.
        command: the program and its arguments, as a shell writes them.
    """
    address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **address},
            start_new_session=True,  # Ctrl-C is for the run; and to end what it starts itself
        )
    except OSError as error:
        raise ConfigError(f"the command {command!r} cannot be started: {error}.") from error
    try:
        line = json.dumps(dict(row), default=str) + "\n"
        out, err = await process.communicate(line.encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode != 0:
        last = "\n".join(err.decode(errors="replace").splitlines()[-_LINES:])
        raise PlimsollError(f"{command!r} ended with exit code {process.returncode}:\n{last}")
    return _read_reward(out.decode(errors="replace"))


def _read_reward(text: str) -> float | None:
    lines = text.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(last, dict) or "reward" not in last:
        return None
    reward = finite(last["reward"])
    if reward is None:
        raise PlimsollError(f"its reward is {shown(last['reward'])}, not a finite number")
    return reward
