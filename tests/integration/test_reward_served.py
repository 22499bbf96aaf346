"""`plimsoll serve-reward` in a process of its own, and a run that it answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from plimsoll.commands.serve_reward import TOKEN
from plimsoll.config.reward import HttpReward, RewardConfig
from plimsoll.errors import PlimsollError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.score import open_rewards

CONFIG = """# ppo
run: {directory: out, steps: 3}
cluster: {where: local}
data: {train: {path: rows.jsonl, prompt: p, reference: r}, max_tokens: 100}
actor: {model: {path: m}}
critic: {model: {path: m}}
rollout: {transformers: {}}
rewards:
  right: {name: exact_match, weight: 3.0}
  own: {name: "own:does", process: true, retries: 0}
"""
OWN = """
import os
def does(trajectory):
    match trajectory.response_text:
        case "crash": os._exit(1)
        case "nan": return float("nan")
    return trajectory.prompt.columns.get("level", len(trajectory.response_tokens))
"""

Served = Callable[..., str]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Starts `plimsoll serve-reward`; gives its first address, and ends it by Ctrl-C."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "job.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> str:
        command = [sys.executable, "-m", "plimsoll", "serve-reward", str(tmp_path / "job.yaml")]
        process = subprocess.Popen(
            [*command, "--port", "0", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: "word", "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().endswith(f"Authorization, with Bearer and: ${TOKEN}\n")
        return process.stdout.readline().removeprefix("POST ").strip()

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)


def response(text: str, index: int, **columns: object) -> Trajectory:
    prompt = Prompt(index, np.arange(2), "How long?", "ref", "hard", columns)
    logprobs = np.zeros(2, dtype=np.float32)
    return single_turn(prompt, 0, np.arange(2), logprobs, text, "length", 0, group=index)


def test_a_reward_of_a_config_is_served_to_a_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "word")
    url = served("--reward", "own")
    assert url.endswith("/own")
    keyless = HttpReward(urls=(url,), retries=0)
    with (
        open_rewards({"far": RewardConfig(http=keyless)}) as scorer,
        pytest.raises(PlimsollError, match=r"answered 401: .*Authorization: Bearer"),
    ):
        scorer.submit([response("a", 0)]).result(60)
    config = {"far": RewardConfig(http=keyless.model_copy(update={"api_key": TOKEN}))}
    with open_rewards(config) as scorer:
        given = [response("a", 0), response("crash", 1), response("b", 2, level=7)]
        scored = scorer.submit(given).result(60)
        assert [t.rewards[0].value for t in scored.trajectories] == [2.0, 7.0]
        (failure,) = scored.failures
        assert re.search(r"'own' \(own:does\), at row 1 .*exit code 1", failure.said)
        with pytest.raises(PlimsollError, match=r"answered 422: .*gave nan"):
            scorer.submit([response("nan", 0)]).result(60)


def test_both_formats_are_served(served: Served) -> None:
    base = served("--reward", "right").rpartition("/")[0]
    body = {"query": ["2 + 2 = #### 4", "2 + 2 = #### 5"], "prompts": ["2 + 2 =", "2 + 2 ="]}
    by_url = f"{base}/get_reward".replace("//", "//any:word@")  # OpenRLHF takes a URL alone
    reply = httpx.post(by_url, json={**body, "labels": ["4", "4"]}, timeout=60)
    assert reply.json() == {"rewards": [1.0, 0.0], "scores": [1.0, 0.0], "extra_logs": {}}
    own = {"trajectories": [{"response": "#### 4", "reference": "4"}]}
    key = {"Authorization": "Bearer word"}
    right = httpx.post(f"{base}/score", json=own, timeout=60, headers=key)
    assert right.json() == {"rewards": [1.0]}
    wrong = httpx.post(f"{base}/score", json={"texts": []}, timeout=60, headers=key)
    assert wrong.status_code == 422 and '"query" is no list' in wrong.json()["detail"]
    assert httpx.get(f"{base}/health").json() == {"status": "ok"}
