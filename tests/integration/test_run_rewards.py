"""Rewards that fail in real runs: servers that die, come back, or lie; functions that hang, raise,
crash or eat memory."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow.parquet as parquet
import pytest
from commands import GRPO, Outcome, column, metrics, run_here, write_config, write_task

STEPS, PROMPTS, RESPONSES = 3, 6, 2
CONFIG: dict[str, Any] = GRPO | {
    "run": {"directory": "run", "steps": STEPS, "tensorboard": False},
    "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 60},
    "rollout": GRPO["rollout"]
    | {"transformers": {"max_sequences": 4}, "sampling": {"max_new_tokens": 8}},
}
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

left = int(sys.argv[2])

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        left -= 1
        if left == 0:
            os._exit(7)  # in the middle of a request
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["trajectories"]
        lengths = [len(one["response_tokens"]) for one in asked]
        answer = eval(sys.argv[3])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LENGTHS = "json.dumps({'rewards': lengths})"
FUNCTION = """
import os, time

def does(trajectory):
    match trajectory.prompt.index:
        case 3: time.sleep(60)
        case 7: raise ValueError("no such thing")
        case 11: return float(len(bytearray(2**33)))
        case 14: os._exit(3)
    return float(len(trajectory.response_tokens))
"""
FAILING = {3, 7, 11, 14}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("rewards")
    write_task(home)
    (home / "own_failing_rewards.py").write_text(FUNCTION)
    return home


@contextmanager
def server(answer: str = LENGTHS, dies_at: int = 0, down: float = 0.0) -> Iterator[int]:
    """The port of one that dies at a request, 0 at none, and comes back after so many seconds."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = int(place.getsockname()[1])
    over, last = Event(), [started(port, dies_at, answer)]

    def bring_back() -> None:
        while not over.wait(0.02):
            if last[0].poll() == 7:
                time.sleep(down)
                last[0] = started(port, 0, answer)

    keeper = Thread(target=bring_back)
    keeper.start()
    try:
        yield port
    finally:
        over.set()
        keeper.join()
        last[0].kill()
        last[0].wait()


def started(port: int, dies_at: int, answer: str) -> subprocess.Popen[bytes]:
    words = (str(port), str(dies_at), answer)
    return subprocess.Popen([sys.executable, "-c", SERVER, *words])


def train(home: Path, name: str, rewards: dict[str, Any], **batch: Any) -> Outcome:
    config = CONFIG | {"rewards": rewards, "batch": CONFIG["batch"] | batch}
    write_config(home, name, config | {"run": CONFIG["run"] | {"directory": name}})
    return run_here(home, "grpo", f"{name}.yaml")


def far(port: int) -> dict[str, Any]:
    urls = [f"http://127.0.0.1:{port}/score"]
    return {"far": {"http": {"urls": urls, "batch": 4}, "normalize": True}}


def rows(directory: Path) -> list[list[dict[str, Any]]]:
    return [parquet.read_table(p).to_pylist() for p in sorted(directory.glob("trajectories/*"))]


def test_a_run_whose_server_dies_for_a_while_loses_nothing(home: Path) -> None:
    """It is the run that it would have been, also where values are normalised over the run."""
    with server() as port:
        assert train(home, "whole", far(port)).code == 0
    with server(dies_at=4, down=3.0) as port:
        begin = time.monotonic()
        outcome = train(home, "died", far(port))
        assert outcome.code == 0 and time.monotonic() - begin > 3
    assert column(metrics(home / "died"), "groups/failed") == [0] * STEPS
    assert [len(step) for step in rows(home / "died")] == [PROMPTS * RESPONSES] * STEPS
    assert rows(home / "died") == rows(home / "whole")
    assert metrics(home / "died") == metrics(home / "whole")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("'<html>'", "answered no JSON: '<html>'"),
        ("json.dumps({'score': 1})", """answered {'score': 1}, and {"rewards": [...]} is needed"""),
        ("json.dumps({'rewards': lengths[1:]})", "gave 3 numbers for 4 responses"),
    ],
)
def test_a_server_that_answers_something_else_stops_the_run_and_is_shown(
    home: Path, tmp_path: Path, answer: str, said: str
) -> None:
    with server(answer) as port:
        outcome = train(home, tmp_path.name, far(port))
    assert outcome.code == 1 and said in outcome.err
    assert "The reward 'far', at row " in outcome.err and "The response: " in outcome.err
    assert not (home / tmp_path.name / "trajectories").exists()


def own() -> dict[str, Any]:
    process = {"process": True, "time_limit": 1, "memory_gib": 1, "retries": 0}
    return {"mine": {"name": "own_failing_rewards:does"} | process}


def test_a_group_whose_reward_fails_is_replaced_and_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(home)
    outcome = train(home, "costs", own(), max_failed_groups=1.0)
    assert outcome.code == 0
    failed = column(metrics(home / "costs"), "groups/failed")
    drawn = column(metrics(home / "costs"), "groups/drawn")
    assert sum(failed) >= len(FAILING)  # a step more than an epoch is drawn
    assert [n - PROMPTS for n in drawn] == failed
    for step in rows(home / "costs"):
        assert len(step) == PROMPTS * RESPONSES
        assert not FAILING & {row["prompt_index"] for row in step}


def test_beyond_the_bound_the_run_stops_with_reward_row_and_message(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(home)
    outcome = train(home, "stops", own(), max_failed_groups=0.2, prompts=16)
    assert outcome.code == 1
    assert re.search("rewards .* 4 groups of a step of 16", outcome.err)
    assert "batch.max_failed_groups is 0.2" in outcome.err
    assert "'mine' (own_failing_rewards:does), at" in outcome.err
    hangs, raises = "took longer than its time_limit of 1 s", "raised ValueError: no such thing"
    eats, crashes = "raised MemoryError", "'s process ended with exit code 3"
    assert any(said in outcome.err for said in (hangs, raises, eats, crashes))
