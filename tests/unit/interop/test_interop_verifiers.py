"""Where verifiers is, and the process that plays episodes: a program of our own stands in for its
Python here. The real one is in tests/integration/."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.environment.adapters import EpisodeAgent
from plimsoll.environment.agents.play import AgentResult
from plimsoll.environment.opening import open_environment
from plimsoll.environment.price import process_items
from plimsoll.environment.results import EnvironmentFailed
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.interop.verifiers import venv
from plimsoll.interop.verifiers.child import PlayerProcess


def test_the_directory_is_beside_our_own_or_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(venv.PLACE, raising=False)
    monkeypatch.setattr(sys, "prefix", "/own/.venv")
    assert venv.venv_directory() == Path("/own/.venv-verifiers")
    monkeypatch.setattr(sys, "base_prefix", "/own/.venv")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert venv.venv_directory() == Path("/data/plimsoll/verifiers")
    monkeypatch.setenv(venv.PLACE, str(tmp_path))
    assert venv.venv_directory() == tmp_path
    assert venv.look(tmp_path) == venv.VerifiersInstall(tmp_path, exists=False)
    with pytest.raises(ConfigError, match="`plimsoll setup-verifiers` makes it"):
        venv.player_command("play")


def test_a_python_without_verifiers_is_described(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    found = venv.look(tmp_path)
    assert found.exists and found.version is None and "verifiers" in found.trouble


def test_a_name_is_a_taskset_or_an_environment_with_one() -> None:
    agent = open_environment("verifiers:user-sim+gsm8k")
    assert isinstance(agent, EpisodeAgent) and agent.close is not None
    opening = venv.opening_line("user-sim+gsm8k", {"agent": {}})
    assert opening == {"taskset": "gsm8k", "environment": "user-sim", "options": {"agent": {}}}
    assert venv.opening_line("gsm8k", {})["environment"] == ""
    with pytest.raises(ConfigError, match="carries out tool calls itself"):
        open_environment("verifiers:gsm8k", [len])


def test_the_plan_has_one_process_for_each() -> None:
    config = EnvironmentConfig(name="verifiers:gsm8k")
    [item] = process_items({"maths": config}, 8)
    assert (item.name, item.bytes) == ("process of environments.maths", 292 * 2**20)


PROGRAM = """
import json, sys, time

def write(**line):
    print(json.dumps(line), flush=True)

does = json.loads(sys.stdin.readline())["options"]["does"]
if does == "nothing":
    sys.exit(4)
write(**{does: "so"})
waiting = None
for text in sys.stdin:
    line = json.loads(text)
    episode, name = line["episode"], line.get("task", {}).get("name")
    if "close" in line:
        write(episode=episode, closed=True)
    elif name == "first":
        waiting = episode
    elif name == "second":
        write(episode=episode, reward=2.0, figures={"key": len(line["api_key"])})
        write(episode=waiting, reward=1.0, figures={})
    elif name == "fails":
        write(episode=episode, failed=" raised KeyError: door", lines="in step")
    elif name == "garbage":
        print("{", flush=True)
    elif name == "sleep":
        time.sleep(600)
"""


def process() -> PlayerProcess:
    return PlayerProcess("own", (sys.executable, "-c", PROGRAM))


async def play_one(player: PlayerProcess, name: str, does: str = "ready") -> AgentResult:
    row = {"task": {"name": name}}
    return await player.play(row, base_url="http://x", api_key="four", does=does)


async def play_all(player: PlayerProcess, names: Sequence[str]) -> list[object]:
    work = [play_one(player, name) for name in names]
    return [*await asyncio.gather(*work, return_exceptions=True)]


def failures(results: list[object]) -> list[str]:
    assert all(isinstance(result, EnvironmentFailed) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize(
    ("does", "said"), [("refused", "so"), ("nothing", "ended with exit code 4")]
)
def test_a_process_that_does_not_start_stops_the_run(does: str, said: str) -> None:
    with pytest.raises(PlimsollError, match=f"environment own did not start: {said}"):
        asyncio.run(play_one(process(), "first", does))


def test_episodes_side_by_side_get_their_own_results() -> None:
    async def play() -> list[object]:
        player = process()
        results = await play_all(player, ["first", "second", "fails"])
        await player.close()
        return results

    first, second, failed = asyncio.run(play())
    assert (first, second) == (AgentResult(1.0), AgentResult(2.0, {"key": 4}))
    assert isinstance(failed, EnvironmentFailed) and failed.failed.lines == "in step"
    assert failed.failed.said == " raised KeyError: door"


def test_a_broken_process_costs_its_episodes_and_is_replaced() -> None:
    async def play() -> tuple[list[object], list[object]]:
        player = process()
        broken = await play_all(player, ["first", "garbage"])
        whole = await play_all(player, ["first", "second"])
        await player.close()
        return broken, whole

    broken, whole = asyncio.run(play())
    assert all(said.startswith("'s process was ended by SIGKILL") for said in failures(broken))
    assert whole == [AgentResult(1.0), AgentResult(2.0, {"key": 4})]


def test_giving_an_episode_up_ends_a_process_in_which_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plimsoll.interop.verifiers.child._END_SECONDS", 0.5)

    async def give_up(player: PlayerProcess, name: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await play_one(player, name)

    async def play() -> list[object]:
        player = process()
        await play_all(player, ["fails"])  # so that it has started
        other = asyncio.create_task(play_one(player, "first"))
        await give_up(player, "idle")
        assert not other.done()
        await give_up(player, "sleep")
        results = await asyncio.gather(other, return_exceptions=True)
        await player.close()
        return [*results]

    [said] = failures(asyncio.run(play()))
    assert said.startswith("'s process was ended by SIGKILL")
