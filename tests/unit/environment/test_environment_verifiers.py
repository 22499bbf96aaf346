"""Where verifiers is, and a process that plays episodes: lines of JSON from a program of our own,
as the real ones are in tests/integration/."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.environment.opening import opened
from plimsoll.environment.price import process_items
from plimsoll.environment.verifiers import venv
from plimsoll.environment.verifiers.process import VerifiersEnvironment, VerifiersProcess
from plimsoll.errors import ConfigError, PlimsollError


def test_it_is_beside_our_own_environment_or_where_it_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(venv.PLACE, raising=False)
    monkeypatch.setattr(sys, "prefix", "/work/.venv")
    assert venv.place() == Path("/work/.venv-verifiers")
    monkeypatch.setattr(sys, "base_prefix", "/work/.venv")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert venv.place() == Path("/data/plimsoll/verifiers")
    monkeypatch.setenv(venv.PLACE, str(tmp_path))
    assert venv.place() == tmp_path
    assert venv.look(tmp_path) == venv.Found(tmp_path, exists=False)
    with pytest.raises(ConfigError, match="`plimsoll setup-verifiers` makes it"):
        venv.player_command("play")


def test_another_python_than_one_with_verifiers_is_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    found = venv.look(tmp_path)
    assert found.exists and found.version is None and "verifiers" in found.trouble


def test_names_are_of_a_taskset_or_of_an_environment_with_one() -> None:
    own = opened("verifiers:user-sim+gsm8k")
    assert own == VerifiersEnvironment("user-sim+gsm8k")
    setup = venv.setup_of("user-sim+gsm8k", {"agent": {}})
    assert setup == {"taskset": "gsm8k", "environment": "user-sim", "options": {"agent": {}}}
    assert venv.setup_of("gsm8k", {})["environment"] == ""
    with pytest.raises(ConfigError, match="carries out tool calls itself"):
        opened("verifiers:gsm8k", [len])


def test_the_plan_has_one_process_for_each() -> None:
    config = EnvironmentConfig(name="verifiers:gsm8k")
    [item] = process_items({"maths": config}, 8)
    assert (item.name, item.bytes) == ("process of environments.maths", 292 * 2**20)


PROGRAM = """
import json, sys, time
setup = json.loads(sys.stdin.readline())
if setup["does"] == "nothing":
    sys.exit(4)
print(json.dumps({setup["does"]: "so"}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "ping" in message:
        print(json.dumps({"pong": 1}), flush=True)
    elif message.get("task") == "echo":
        print(json.dumps({"episode": message["episode"], "turn": 0, "asked": {}}), flush=True)
    elif message.get("task") == "garbage":
        print("{", flush=True)
    elif message.get("task") == "sleep":
        time.sleep(600)
    elif "turn" in message:
        print(json.dumps({"episode": message["episode"], "reward": 1.0}), flush=True)
"""


def process_that(does: str) -> VerifiersProcess:
    return VerifiersProcess("own", [sys.executable, "-c", PROGRAM], {"does": does})


@pytest.mark.parametrize(
    ("does", "said"), [("refused", "so"), ("nothing", "ended with exit code 4")]
)
def test_one_that_does_not_start_stops_the_run(does: str, said: str) -> None:
    with pytest.raises(PlimsollError, match=f"environment own did not start: {said}"):
        asyncio.run(process_that(does).begin({}))


def test_episodes_side_by_side_hear_their_own_lines_and_a_broken_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def talk() -> None:
        process = process_that("ready")
        one, other = await process.begin("echo"), await process.begin("echo")  # type: ignore[arg-type]
        assert (await other.heard())["episode"] == other.number
        assert (await one.heard())["episode"] == one.number != other.number
        assert not await one.end_if_deaf()
        one.say({"turn": 0})
        assert (await one.heard())["reward"] == 1.0
        broken = await process.begin("garbage")  # type: ignore[arg-type]
        failed = [await other.heard(), await broken.heard()]
        said = "'s process was ended by SIGKILL"
        assert all(message["failed"].startswith(said) for message in failed)
        other.close()
        late = await process.begin("sleep")  # type: ignore[arg-type]
        assert late.running is not one.running
        monkeypatch.setattr("plimsoll.environment.verifiers.process._END_SECONDS", 0.5)
        assert await late.end_if_deaf()
        heard: Any = await late.heard()
        assert heard["failed"].startswith(said)
        await process.close()

    asyncio.run(talk())
