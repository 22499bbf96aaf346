"""An agent as a command of its own: each episode starts it once."""

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
"""Of what a command that failed wrote."""


async def command(
    row: Mapping[str, Any], base_url: str, api_key: str, *, command: str
) -> float | None:
    """It finds the policy as OpenAI's clients do, by OPENAI_BASE_URL and OPENAI_API_KEY, and reads
    the row as one line of JSON from its standard input. The last line that it writes may be
    `{"reward": 1.0}`.

    command: the program and its arguments, as a shell writes them. Raises PlimsollError where it
    ends with another exit code than 0.
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
    return _reward(out.decode(errors="replace"))


def _reward(text: str) -> float | None:
    """Of the last line, where that is an object with one; else None."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, dict) or "reward" not in found:
        return None
    value = finite(found["reward"])
    if value is None:
        raise PlimsollError(f"its reward is {shown(found['reward'])}, not a finite number")
    return value
