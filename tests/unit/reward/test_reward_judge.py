"""A judge behind an endpoint of OpenAI's form: a real server that answers as its prompt says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest

from plimsoll.config.reward import JudgeReward, RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.references import check_rewards
from plimsoll.reward.score import Scored, open_rewards


class Endpoint(BaseHTTPRequestHandler):
    """Answers with the text in `answers`, the last one again and again."""

    asked: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []
    answers: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(200)
        self.end_headers()
        message = {"role": "assistant", "content": text}
        self.wfile.write(json.dumps({"choices": [{"message": message}]}).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Endpoint, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def trajectory(**columns: object) -> Trajectory:
    tokens = np.zeros(2, dtype=np.int64)
    prompt = Prompt(7, tokens, "2 + 2?", "4", columns=columns)
    return single_turn(prompt, 0, tokens, np.zeros(2, np.float32), "It is {4}.", "stop", 0)


def judged(url: str, answers: list[str], given: Trajectory, **settings: Any) -> Scored:
    Endpoint.answers[:] = answers
    prompt = {"prompt": "{prompt} {response} Right: {reference}. Level {level}. {{}}", **settings}
    judge = JudgeReward(url=url, model="m", **prompt)
    with open_rewards({"taste": RewardConfig(judge=judge)}) as scorer:
        return scorer.submit([given]).result(30)


def test_the_last_score_counts_as_a_share_of_the_range(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    settings = {"system": "Be fair.", "api_key": "JUDGE_KEY", "low": 1.0, "high": 5.0}
    scored = judged(url, ["Score: 2? No.\nScore: 4"], trajectory(level=3), **settings)
    assert scored.trajectories[0].rewards[0].value == 0.75
    ((path, authorization, body),) = Endpoint.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "2 + 2? It is {4}. Right: 4. Level 3. {}"},
        ],
        "temperature": 0.0,
        "max_tokens": 1024,
    }


def test_an_answer_without_a_score_is_requested_again(url: str) -> None:
    answers = ["Well.", "Score: 11", "**Score**: 10"]
    scored = judged(url, answers, trajectory(level=3))
    assert scored.trajectories[0].rewards[0].value == 1.0 and len(Endpoint.asked) == 3


@pytest.mark.parametrize(
    ("answer", "settings", "why"),
    [
        ("Well.", {}, r"no score .*'Well\.'"),
        ("Score: 11", {}, "score of 11, .*0 to 10.*'Score: 11'"),
        ("It is good", {"pattern": "(good|bad)"}, "'good' in 'It is good'"),
    ],
)
def test_an_answer_that_stays_without_a_score_is_a_failure(
    url: str, answer: str, settings: dict[str, Any], why: str
) -> None:
    scored = judged(url, [answer], trajectory(level=3), retries=1, **settings)
    (failure,) = scored.failures
    assert (failure.reward, failure.prompt_index) == ("taste", 7)
    assert re.search(why, failure.said) and "'2 + 2?'" in failure.shown


def test_a_missing_column_or_key_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"row 7 .*judge.*'level'"):
        judged(url, ["Score: 1"], trajectory())
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        judged(url, ["Score: 1"], trajectory(level=1), api_key="NO_SUCH_KEY")
    assert Endpoint.asked == []


def test_a_key_that_is_not_set_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = JudgeReward(url="https://h/v1", model="m", prompt="{response}", api_key="JUDGE_KEY")
    (problem,) = check_rewards({"taste": RewardConfig(judge=judge)})
    assert (problem.key, problem.what) == ("rewards.taste.judge.api_key", "JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert [*check_rewards({"taste": RewardConfig(judge=judge)})] == []
