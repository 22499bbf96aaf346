"""Rewards from servers: real ones, in processes of their own, that die, come back, or lie."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.config.reward import HttpReward, RewardConfig
from plimsoll.errors import PlimsollError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.outcome import LONGEST_WAIT
from plimsoll.reward.score import _SERVER_WAIT, Scored, open_rewards

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[2], "a") as file:
            file.write(body.decode() + "\\n")
        time.sleep(float(sys.argv[3]))
        asked = json.loads(body)
        texts = asked.get("query") or asked.get("input")
        texts = texts or [t["response"] for t in asked["trajectories"]]
        status, answer = ANSWER(texts)
        answer = answer.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass

ThreadingHTTPServer.daemon_threads = True
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LENGTHS = "lambda texts: (200, json.dumps({'rewards': [len(t) for t in texts]}))"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])


@contextmanager
def server(port: int, log: Path, answer: str = LENGTHS, delay: float = 0.0) -> Iterator[None]:
    """One that answers at this port until the end of the block, and is then killed."""
    program = SERVER.replace("ANSWER", f"({answer})")
    process = subprocess.Popen([sys.executable, "-c", program, str(port), str(log), str(delay)])
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def trajectory(response: str, index: int = 0, **columns: object) -> Trajectory:
    tokens = np.arange(2, dtype=np.int64)
    prompt = Prompt(index, tokens, "How long? ", "ref", "hard", columns)
    logprobs = np.zeros(2, dtype=np.float32)
    return single_turn(prompt, 0, tokens, logprobs, response, "length", 0, group=index)


def rewards(*ports: int, **settings: Any) -> dict[str, RewardConfig]:
    urls = tuple(f"http://127.0.0.1:{port}/score" for port in ports)
    return {"far": RewardConfig(http=HttpReward(urls=urls, **settings))}


def values(scored: Scored) -> list[float]:
    return [t.rewards[0].value for t in scored.trajectories]


def asked(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_batches_of_plimsolls_format(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    given = [trajectory("a" * i, i, level=3) for i in range(5)]
    with server(port, log), open_rewards(rewards(port, batch=2)) as scorer:
        assert values(scorer.submit(given).result(30)) == [0, 1, 2, 3, 4]
    batches = [[t["response"] for t in body["trajectories"]] for body in asked(log)]
    assert sorted(batches) == [["", "a"], ["aa", "aaa"], ["aaaa"]]
    first = next(body for body in asked(log) if body["trajectories"][0]["index"] == 4)
    assert first["trajectories"][0] == {
        "prompt": "How long? ",
        "messages": [],
        "is_text": False,
        "response": "aaaa",
        "reference": "ref",
        "source": "hard",
        "columns": {"level": 3},
        "index": 4,
        "group": 4,
        "finish_reason": "length",
        "prompt_tokens": [0, 1],
        "response_tokens": [0, 1],
    }


def test_openrlhfs_format(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with server(port, log), open_rewards(rewards(port, format="openrlhf")) as scorer:
        assert values(scorer.submit([trajectory("ab"), trajectory("c")]).result(30)) == [12, 11]
    assert asked(log) == [
        {
            "query": ["How long? ab", "How long? c"],
            "prompts": ["How long? ", "How long? "],
            "labels": ["ref", "ref"],
        }
    ]


CLASSIFIED = """lambda rows: (200, json.dumps(
    {"data": [{"index": i, "probs": [len(row)]} for i, row in reversed([*enumerate(rows)])]}
))"""


def test_vllms_format(tmp_path: Path) -> None:
    """The actor's tokens, in one request; scores in the order of what was asked."""
    port, log = free_port(), tmp_path / "log"
    longer = replace(trajectory("b"), prompt=Prompt(1, np.arange(3), "?"))
    with server(port, log, CLASSIFIED), open_rewards(rewards(port, format="vllm")) as scorer:
        assert values(scorer.submit([trajectory("a"), longer]).result(30)) == [4, 5]
    assert [body["input"] for body in asked(log)] == [[[0, 1, 0, 1], [0, 1, 2, 0, 1]]]
    assert asked(log)[0]["use_activation"] is False


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("lambda rows: (200, '{\"rewards\": [1]}')", "needed, as vLLM's /classify answers"),
        ("lambda rows: (200, '{\"data\": []}')", "gave 0 numbers for 1 responses"),
        (
            """lambda rows: (200, '{"data": [{"index": 0, "probs": [0.1, 0.9]}]}')""",
            r"gave \[\[0.1, 0.9\]\]",
        ),
        (
            """lambda rows: (200, '{"data": [{"index": 0, "probs": [NaN]}]}')""",
            r"gave nan \(float\)",
        ),
    ],
)
def test_a_reply_of_vllm_that_is_no_score_stops_the_run(
    tmp_path: Path, answer: str, why: str
) -> None:
    port = free_port()
    config = rewards(port, format="vllm")
    with (
        server(port, tmp_path / "log", answer),
        open_rewards(config) as scorer,
        pytest.raises(PlimsollError, match=f"The reward 'far', at row 0 .*{why}"),
    ):
        scorer.submit([trajectory("a")]).result(30)


def test_by_default_a_server_may_be_dead_for_a_minute() -> None:
    waits = [min(LONGEST_WAIT, _SERVER_WAIT * 2**i) for i in range(HttpReward(urls=()).retries)]
    assert waits[0] == 0.5 and 60 <= sum(waits) < 120


@pytest.mark.slow
def test_a_server_that_is_dead_for_twenty_seconds_loses_nothing(tmp_path: Path) -> None:
    dies_and_comes_back(tmp_path, 20.0)


def test_a_server_that_dies_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    dies_and_comes_back(tmp_path, 2.0)


def dies_and_comes_back(tmp_path: Path, seconds: float) -> None:
    """It is killed with requests on their way."""
    port, log = free_port(), tmp_path / "log"
    given = [trajectory("a" * i, i) for i in range(12)]
    with open_rewards(rewards(port, batch=2)) as scorer:
        with server(port, log, delay=0.4):
            future = scorer.submit(given)
            time.sleep(0.6)
        assert not future.done()
        time.sleep(seconds)
        with server(port, log):
            scored = future.result(90)
    assert values(scored) == list(range(12)) and scored.failures == ()


def test_a_dead_replica_is_left_alone_and_the_least_busy_one_is_asked(tmp_path: Path) -> None:
    dead, slow, fast = free_port(), free_port(), free_port()
    given = [trajectory("a" * i, i) for i in range(40)]
    with (
        server(slow, tmp_path / "slow", delay=0.5),
        server(fast, tmp_path / "fast"),
        open_rewards(rewards(dead, slow, fast, batch=1, at_once=1)) as scorer,
    ):
        scored = scorer.submit(given).result(30)
    assert values(scored) == list(range(40))
    assert len(asked(tmp_path / "fast")) > 2 * len(asked(tmp_path / "slow")) > 0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("lambda texts: (200, 'It went well.')", "answered no JSON: 'It went well.'"),
        ("lambda texts: (200, '[1, 2, 3]')", r"answered \[1, 2, 3\], and {\"rewards\""),
        ("lambda texts: (200, '{\"rewards\": [1, 2]}')", r"gave 2 numbers for 3 .*: \[1, 2\]"),
        ("lambda texts: (200, '{\"rewards\": [1, NaN, 2]}')", r"row 1 .* gave nan \(float\)"),
        ("lambda texts: (200, '{\"rewards\": [1, null, 2]}')", r"row 1 .* gave None"),
        ('lambda texts: (200, \'{"rewards": [1, "2", 2]}\')', r"row 1 .* gave '2' \(str\)"),
        ("lambda texts: (404, 'no such place')", "answered 404: 'no such place'"),
        ("lambda texts: (200, '[' * (65 << 20))", "answered more than 64 MiB"),
    ],
)
def test_garbage_stops_the_run_and_is_shown(tmp_path: Path, answer: str, why: str) -> None:
    port, log = free_port(), tmp_path / "log"
    with server(port, log, answer), open_rewards(rewards(port)) as scorer:
        future = scorer.submit([trajectory("a", i) for i in range(3)])
        with pytest.raises(PlimsollError, match=f"The reward 'far', at .*{why}"):
            future.result(30)
    assert len(asked(log)) == 1


@pytest.mark.parametrize(
    ("answer", "delay", "why"),
    [
        ("lambda texts: (503, 'too many')", 0.0, "503: 'too many'"),
        (LENGTHS, 5.0, r"0\.5 s \(rewards\.far\.http\.time_limit\)"),
        (None, 0.0, "reached: All connection attempts failed"),
    ],
)
def test_a_server_that_fails_on_every_try_costs_its_trajectories(
    tmp_path: Path, answer: str | None, delay: float, why: str
) -> None:
    port, log = free_port(), tmp_path / "log"
    with ExitStack() as stack:
        if answer is not None:
            stack.enter_context(server(port, log, answer, delay))
        scorer = stack.enter_context(open_rewards(rewards(port, retries=1, time_limit=0.5)))
        scored = scorer.submit([trajectory("a", 0), trajectory("b", 1)]).result(30)
    assert scored.trajectories == ()
    assert [(f.reward, f.prompt_index) for f in scored.failures] == [("far", 0), ("far", 1)]
    assert re.search(rf"http://127\.0\.0\.1:{port}/score .*{why}", scored.failures[1].said)
    assert answer is None or len(asked(log)) == 2
