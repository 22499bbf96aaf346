"""Keys of servers, judges and webhooks are nowhere in what a run writes and prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from choice import slow
from commands import GRPO, run, write_config, write_task

MARK = "mArKeD"
KEYS = {name: f"{MARK}-{name.lower()}-0123456789" for name in ("SCORE_KEY", "JUDGE_KEY")}
HOOK = f"T0/{MARK}-hook"


class Talkative(BaseHTTPRequestHandler):
    """A server that repeats the key that it was sent; from a request on it refuses the key."""

    paths: ClassVar[list[str]] = []
    refuses_from: ClassVar[int] = 10**9

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.paths.append(self.path)
        key = self.headers["Authorization"]
        answer: dict[str, Any] = {"key": key}
        if "trajectories" in body:
            answer["rewards"] = [0.5 for _ in body["trajectories"]]
        if "messages" in body:
            message = {"role": "assistant", "content": f"{key} has 3 friends. Score: 5"}
            answer["choices"] = [{"message": message}]
        refuses = key is not None and len(self.paths) > self.refuses_from
        self.send_response(401 if refuses else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"error": f"wrong: {key}"} if refuses else answer).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(Talkative, "paths", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Talkative)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def places(directory: Path) -> list[str]:
    """The files in which the mark is."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return [str(path) for path in files if MARK.encode() in path.read_bytes()]


@pytest.mark.parametrize("refuses_from", [10**9, slow(20)])
def test_they_are_in_no_file_and_no_line(
    tmp_path: Path, port: int, refuses_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Talkative, "refuses_from", refuses_from)
    home, hook = tmp_path / "home", f"http://127.0.0.1:{port}/{HOOK}"
    home.mkdir()
    write_task(home)
    address = f"http://127.0.0.1:{port}"
    judge = {"url": f"{address}/v1", "model": "m", "prompt": "{response}", "api_key": "JUDGE_KEY"}
    score = {"urls": [f"{address}/score"], "api_key": "SCORE_KEY"}
    config = GRPO | {
        "run": {"directory": "run", "steps": 2, "save_every": 1},
        "batch": {"prompts": 4, "responses": 2, "micro_batch_tokens": 60},
        "rollout": GRPO["rollout"] | {"sampling": {"max_new_tokens": 8}},
        "rewards": {"taste": {"judge": judge}, "far": {"http": score}},
    }
    write_config(home, "grpo", config)
    words = ("grpo", "grpo.yaml", "--run.notify", hook)
    outcome = run(home, *words, environment=KEYS, supervised=True)
    assert outcome.code == (0 if refuses_from > 20 else 1), outcome.err
    assert {"/score", "/v1/chat/completions", f"/{HOOK}"} <= set(Talkative.paths)
    assert ("401" in outcome.err) == (refuses_from == 20)
    assert MARK not in outcome.out + outcome.err
    assert places(home) == []
