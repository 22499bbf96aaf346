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
    install = venv.look(tmp_path)
    assert install.exists and install.version is None and "verifiers" in install.trouble


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
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

does = json.loads(sys.stdin.readline())["options"]["does"]
if does != "play":
    if does == "refuse":
        print(json.dumps({"refused": "so"}), flush=True)
    sys.exit(4)
second = threading.Event()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): ...

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = asked["task"]["name"]
        answer = {"reward": 2.0, "figures": {"key": len(asked["api_key"])}}
        if name == "first":
            second.wait()
            answer = {"reward": 1.0, "figures": {}}
        elif name == "second":
            second.set()
        elif name == "fails":
            answer = {"failed": " raised KeyError: door", "lines": "in step"}
        elif name == "dies":
            os._exit(3)
        elif name == "blocks":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # until another thread has taken the signal
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps({"ready": "1", "port": server.server_address[1]}), flush=True)
sys.stdin.read()
os._exit(0)
"""


def process() -> PlayerProcess:
    return PlayerProcess("own", (sys.executable, "-c", PROGRAM))


async def play_one(player: PlayerProcess, name: str, does: str = "play") -> AgentResult:
    row = {"task": {"name": name}}
    return await player.play(row, base_url="http://x", api_key="four", does=does)


async def play_all(player: PlayerProcess, names: Sequence[str]) -> list[object]:
    work = [play_one(player, name) for name in names]
    return [*await asyncio.gather(*work, return_exceptions=True)]


@pytest.mark.parametrize(("does", "why"), [("refuse", "so"), ("end", "ended with exit code 4")])
def test_a_process_that_does_not_start_stops_the_run(does: str, why: str) -> None:
    with pytest.raises(PlimsollError, match=f"environment own did not start: {why}"):
        asyncio.run(play_one(process(), "first", does))


def test_episodes_side_by_side_get_their_own_results() -> None:
    async def play() -> list[object]:
        player = process()
        results = await play_all(player, ["first", "second", "fails"])
        await player.close()
        return results

    first, second, failed = asyncio.run(play())
    assert (first, second) == (AgentResult(1.0), AgentResult(2.0, {"key": 4}))
    assert isinstance(failed, EnvironmentFailed)
    assert (failed.failed.said, failed.failed.lines) == (" raised KeyError: door", "in step")


def test_a_process_that_dies_costs_its_episodes_and_is_replaced() -> None:
    async def play() -> tuple[list[object], list[object]]:
        player = process()
        await play_all(player, ["fails"])  # so that it has started
        broken = await play_all(player, ["first", "dies"])
        whole = await play_all(player, ["first", "second"])
        await player.close()
        return broken, whole

    broken, whole = asyncio.run(play())
    assert [str(error) for error in broken] == ["'s process ended with exit code 3"] * 2
    assert whole == [AgentResult(1.0), AgentResult(2.0, {"key": 4})]


def test_giving_an_episode_up_ends_a_process_in_which_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plimsoll.interop.verifiers.child._END_SECONDS", 0.5)

    async def give_up(player: PlayerProcess, name: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await play_one(player, name)

    async def play() -> tuple[bool, list[object]]:
        player = process()
        await play_all(player, ["fails"])  # so that it has started
        other = asyncio.create_task(play_one(player, "first"))
        await give_up(player, "first")
        was_over = other.done()
        await give_up(player, "blocks")
        result = await asyncio.gather(other, return_exceptions=True)
        await player.close()
        return was_over, [*result]

    was_over, [error] = asyncio.run(play())
    assert not was_over and isinstance(error, EnvironmentFailed)
    assert str(error).startswith("'s process was ended by SIGKILL")
