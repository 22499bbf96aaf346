"""An agent as a command, which starts once for each episode."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from functools import partial
from subprocess import PIPE
from typing import Any

from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.process.child import describe_exit, end, last_lines, start
from plimsoll.process.threads import in_thread
from plimsoll.reward.outcome import finite, short_repr


async def command(
    row: Mapping[str, Any], base_url: str, api_key: str, *, command: str
) -> float | None:
    """Run a command for an episode; return the reward that it prints, or None without one.

    The command finds the policy as OpenAI's clients do, by OPENAI_BASE_URL and OPENAI_API_KEY, and
    reads the row as one line of JSON from its standard input. The last line that it writes may be
    `{"reward": 1.0}`. Raises PlimsollError if it ends with another exit code than 0.
    `command` is the program and its arguments, as a shell writes them.
    """
    address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    streams = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    try:
        process = start(shlex.split(command), {**os.environ, **address}, **streams)
    except OSError as error:
        raise ConfigError(f"the command {command!r} cannot be started: {error}.") from error
    line = json.dumps(dict(row), default=str) + "\n"
    try:
        out, err = await in_thread(partial(process.communicate, line.encode()))
    finally:
        end(process)
    if process.returncode != 0:
        how = describe_exit(process.returncode)
        raise PlimsollError(f"{command!r} {how}:\n{last_lines(err)}")
    return _read_reward(out.decode(errors="replace"))


def _read_reward(text: str) -> float | None:
    """Return the reward in the last line, or None if that line is not an object with a reward."""
    lines = text.strip().splitlines()
    try:
        last = parse_json(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(last, dict) or "reward" not in last:
        return None
    value = finite(last["reward"])
    if value is None:
        raise PlimsollError(f"its reward is {short_repr(last['reward'])}, not a finite number")
    return value
