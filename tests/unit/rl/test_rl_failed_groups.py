"""Rewards that fail while a step is sampled: what is shown at once, and when the step is over."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import pytest

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.reward import HttpReward, JudgeReward, RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import RlBatch
from plimsoll.errors import PlimsollError
from plimsoll.jobs.which import spec_of
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.score import RewardFailure, open_rewards
from plimsoll.rl.answers import Answering, FailedGroups
from plimsoll.rl.sampling import Sampled, sample
from plimsoll.sampler.protocol import Request

PROMPTS, RESPONSES = 32, 8
MODULE = """
import time
from threading import Event, Lock

calls, at_work, most = [], 0, 0
lock, release = Lock(), Event()

def hangs(trajectory):
    calls.append(trajectory.prompt.index)
    release.wait(60)
    return 1.0

def hangs_at_first_and_raises(trajectory):
    if trajectory.prompt.index == 0:
        release.wait(60)
    raise ValueError("no such thing")

def slow(trajectory):
    global at_work, most
    with lock:
        at_work += 1
        most = max(most, at_work)
    time.sleep(0.02 * (trajectory.prompt.index % 3))
    with lock:
        at_work -= 1
    return float(trajectory.prompt.index)
"""


@dataclass
class PlainCluster:
    """Answers a request with every prompt's responses, the requests in order."""

    per_request: int
    generated: int = field(default=0)

    def responses_per_request(self) -> int:
        return self.per_request

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        self.generated += 1
        return [response(p, i) for p in request.prompts for i in range(request.responses)]

    def wait_for(self, future: Future[Any]) -> Any:
        return future.result()


def response(prompt: Prompt, number: int) -> Trajectory:
    tokens, logprobs = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return single_turn(prompt, number, tokens, logprobs, "answer", "stop", 0)


def drawn(first: int, count: int) -> list[Prompt]:
    return [Prompt(first + i, np.array([1, 2]), "?") for i in range(count)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with the functions; what hangs is let go at the end."""
    (tmp_path / "own_hanging.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_hanging  # type: ignore[import-not-found]

    yield own_hanging
    own_hanging.release.set()
    del sys.modules["own_hanging"]


def sampled(
    reward: RewardConfig, note: Callable[[str], None], per_request: int = 1, **batch: Any
) -> Sampled:
    """A step with the defaults of `batch`, but for what is given."""
    values = {
        "run": {"directory": "runs/x", "steps": 2},
        "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
        "batch": {"prompts": PROMPTS, "responses": RESPONSES, **batch},
        "actor": {"model": {"path": "m"}},
        "rewards": {"mine": reward},
        "algorithm": {"advantage": {"name": "reinforce"}},
    }
    spec = spec_of(RlConfig.model_validate(values))
    with open_rewards(spec.config.rewards) as scorer:
        cluster = cast(Cluster, PlainCluster(per_request))
        return sample(cluster, spec, drawn, 1, Answering(scorer.loop, scorer.submit, note))


@pytest.mark.parametrize("per_request", [1, PROMPTS * RESPONSES])
def test_a_hung_reward_ends_the_step_at_the_first_group_too_many(
    own: Any, per_request: int
) -> None:
    """Of 32 groups 3 may fail (0.1 of them). One response of each of the first four is tried three
    times: 12 calls, whether groups are scored one by one or all together, and not all 768. (A call
    or two may begin while the scoring is being ended.)"""
    notes: list[str] = []
    reward = RewardConfig(name="own_hanging:hangs", time_limit=0.1)
    with pytest.raises(PlimsollError) as error:
        sampled(reward, notes.append, per_request)
    assert own.calls[:12] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(own.calls) < 24
    first = r"'mine' \(own_hanging:hangs\), at row 0 .*time_limit of 0\.1 s"
    limit = r"batch\.max_failed_groups is 0\.1\b"
    assert re.match(rf"rewards .*4 groups .* 32, .*{limit}.*{first}", str(error.value))
    [note] = notes
    follows = r"tried 2 more times.* 3 groups .*\(batch\.max_failed_groups\)"
    assert re.search(rf"{first} \(rewards\.mine\.time_limit\).*process: true.*{follows}", note)


def test_a_group_that_hangs_does_not_hold_up_the_end(own: Any) -> None:
    """The first group's calls hang for longer than the test may take; others raise meanwhile."""
    reward = RewardConfig(
        name="own_hanging:hangs_at_first_and_raises", time_limit=600, retries=0, at_once=9
    )
    with pytest.raises(PlimsollError, match=r"^rewards .*4 groups .* row 1 "):
        sampled(reward, print)


def test_the_first_timeout_is_shown_before_the_next_try(own: Any) -> None:
    shown = Event()

    def note(line: str) -> None:
        assert own.calls == [0]
        own.release.set()  # the next try answers
        shown.set()

    reward = RewardConfig(name="own_hanging:hangs", time_limit=0.3)
    assert len(sampled(reward, note, prompts=2, responses=1).trajectories) == 2
    assert shown.is_set()


def test_calls_are_made_side_by_side_and_come_in_the_order_of_the_prompts(own: Any) -> None:
    reward = RewardConfig(name="own_hanging:slow", at_once=4)
    found = sampled(reward, print, prompts=8, responses=2).trajectories
    assert own.most == 4
    assert [t.rewards[0].value for t in found] == [float(i) for i in range(8) for _ in range(2)]
    own.most = 0
    sampled(RewardConfig(name="own_hanging:slow"), print, prompts=2, responses=1)
    assert own.most == 1  # a plain function may not be safe in threads


@pytest.mark.parametrize("kind", ["http", "judge"])
def test_servers_and_judges_that_do_not_answer_are_shown_at_once(kind: str) -> None:
    """Nobody listens at the address."""
    url, notes = "http://127.0.0.1:9", list[str]()
    if kind == "http":
        reward = RewardConfig(http=HttpReward(urls=(url,), retries=1))
    else:
        reward = RewardConfig(judge=JudgeReward(url=url, model="m", prompt="?", retries=1))
    with pytest.raises(PlimsollError, match=r"^rewards .*2 groups .* 4, "):
        sampled(reward, notes.append, prompts=4, responses=1)
    (note,) = notes
    assert re.search(r"'mine', at row 0 .*data\.train: http://127\.0\.0\.1:9\b", note)
    assert re.search(r"attempts failed.* 1 more time", note)


def failure(reward: str = "r", group: int = 0, tries_left: int = 0) -> RewardFailure:
    where = f"The reward {reward!r}, at row 7"
    return RewardFailure(
        group, 7, reward, where, " hangs", "", unanswered=True, tries_left=tries_left
    )


def test_each_reward_is_shown_once_and_a_group_counts_once() -> None:
    notes: list[str] = []
    failed = FailedGroups(notes.append, RlBatch(prompts=10, max_failed_groups=0.2))
    for reward in ("a", "b", "a", "b"):
        failed(failure(reward, group=1, tries_left=1))
    assert (len(notes), len(failed)) == (2, 0)
    for group in (1, 1, 2, 2, 1):
        failed(failure(group=group))
    assert len(failed) == 2
    with pytest.raises(PlimsollError, match=r"3 groups .* 10, "):
        failed(failure(group=3))
    failed(failure(group=4))  # all is being ended
    assert len(failed) == 3


def test_no_held_out_prompt_may_fail() -> None:
    notes: list[str] = []
    failed = FailedGroups(notes.append)
    failed(failure(tries_left=2))
    [note] = notes
    assert re.search(r"'r', at row 7 hangs\. .* 2 more times.*held-out", note)
    with pytest.raises(PlimsollError, match=r"'r', at row 7 hangs"):
        failed(failure())
