"""Agents that play whole episodes by calls of their own, in real runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import GRPO, VLLM, Outcome, column, metrics, run_here, write_config, write_task

from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

CONFIG: dict[str, Any] = GRPO | {
    "run": {"directory": "run", "steps": 2, "tensorboard": False},
    "batch": {"prompts": 2, "responses": 4, "micro_batch_tokens": 128},
    "rollout": GRPO["rollout"]
    | {
        "transformers": {"max_sequences": 8},
        "sampling": {"max_new_tokens": 6, "stop": ["1", "3", "5", "7", "9"]},
    },
}
OWN = """
import json, sys
from openai import OpenAI

class Turns:
    '''The same as a protocol's environment.'''

    def reset(self, row):
        self.turn = 0

    def step(self, reply):
        self.turn += 1
        return "1+1=", self.turn == 3

    def get_reward(self):
        return float(self.turn)


def agent(row, base_url, api_key):
    return ask(OpenAI(base_url=base_url, api_key=api_key), row["messages"])


def ask(client, messages):
    for turn in range(3):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0]
        messages = [*messages, answer.message.model_dump(exclude_none=True)]
        if answer.finish_reason == "length":
            return float(turn)
        messages.append({"role": "user", "content": "1+1="})
    return 3.0


def branching(row, base_url, api_key):
    '''Asks twice from the same beginning, and once more from elsewhere.'''
    client = OpenAI(base_url=base_url, api_key=api_key)
    asked = {"messages": row["messages"], "n": 2, "logprobs": True}
    first = client.chat.completions.create(model="any", **asked)
    assert len(first.choices) == 2 and first.choices[0].logprobs.content
    other = [{"role": "user", "content": "2+2="}]
    stream = client.chat.completions.create(model="any", messages=other, stream=True)
    assert [piece.choices[0].finish_reason is None for piece in stream] == [True, False]
    return len(first.choices[0].token_ids) / 10


async def failing(row, base_url, api_key):
    if row["prompt"] == "0+1=":
        raise KeyError("door")
    return None


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"reward": ask(OpenAI(), row["messages"])}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("agents")
    write_task(home)
    (home / "own.py").write_text(OWN)
    return home


def train(home: Path, name: str, environment: dict[str, Any], *flags: str) -> Outcome:
    own = {"name": "own.py:agent", "max_turns": 3, "max_tokens": 40} | environment
    config = CONFIG | {"environments": {"own": own}}
    write_config(home, name, config | {"run": CONFIG["run"] | {"directory": name}})
    return run_here(home, "grpo", f"{name}.yaml", *flags)


def episodes(run: Path) -> list[Trajectory]:
    files = RunDirectory(run).trajectories().values()
    return [episode for path in files for episode in read_trajectories(path)]


def learned(found: list[Trajectory]) -> list[tuple[object, ...]]:
    return [
        (
            *(t.group, t.sample_index, t.prompt.tokens.tolist(), t.response_tokens.tolist()),
            *(t.loss_mask.tolist(), t.sampler_logprobs.tolist(), t.weight_versions.tolist()),
            *(t.finish_reason, t.reward, [(turn.role, turn.end) for turn in t.turns]),
        )
        for t in found
    ]


def test_an_agent_of_openais_client_makes_the_protocols_trajectories(home: Path) -> None:
    """A command that knows nothing of Plimsoll makes them, too."""
    assert train(home, "turns", {"name": "own.py:Turns"}).code == 0
    expected = learned(episodes(home / "turns"))
    assert {row[7] for row in expected} == {"stop", "length"}
    assert max(len(row[9]) for row in expected) == 5  # type: ignore[arg-type]
    ways: dict[str, dict[str, Any]] = {
        "agent": {},
        "command": {"name": "command", "options": {"command": f"{sys.executable} own.py"}},
    }
    for name, own in ways.items():
        outcome = train(home, name, own)
        assert outcome.code == 0, outcome.err
        assert learned(episodes(home / name)) == expected


def test_branches_are_samples_of_one_episode(home: Path) -> None:
    outcome = train(home, "branching", {"name": "own.py:branching"})
    assert outcome.code == 0, outcome.err
    found = episodes(home / "branching")
    assert [t.group for t in found[:8]] == [i // 4 for i in range(8)]
    for t in found:
        once, again, last = t.branches
        assert once.prompt.tokens.tolist() == again.prompt.tokens.tolist()
        assert once.rewards == again.rewards == () and t.figures["branches"] == 3
        assert all(branch.loss_mask.all() and len(branch.loss_mask) for branch in t.branches)
        assert t.reward == pytest.approx(len(once.response_tokens) / 10)
        assert last.token_rewards is not None
        assert np.flatnonzero(last.token_rewards).tolist() == [len(last.response_tokens) - 1]
    assert max(column(metrics(home / "branching"), "mismatch/abs")) < 1e-4
    assert train(home, "replayed", {}, "--replay", "branching").code == 0
    replayed = metrics(home / "replayed")
    for key in ("actor/loss", "actor/grad_norm", "reward"):
        assert column(replayed, key) == column(metrics(home / "branching"), key)


def test_agents_that_fail_or_ask_nothing_are_told(home: Path) -> None:
    outcome = train(home, "failing", {"name": "own.py:failing", "retries": 0})
    assert outcome.code == 1
    assert "'own'" in outcome.err and "asked for no turn" in outcome.err
    wrong = train(home, "wrong", {"name": "own.py:agent", "options": {"deph": 3}})
    assert wrong.code == 2 and "'deph'" in wrong.err
    apart = train(home, "apart", {"process": True})
    assert apart.code == 2 and "name: command" in apart.err


@pytest.mark.slow
def test_an_agent_plays_on_while_the_ranks_train(home: Path) -> None:
    rollout = CONFIG["rollout"] | VLLM | {"staleness": 1}
    config = CONFIG | {
        "run": {"directory": "beside", "steps": 3},
        "cluster": {"where": "ray", "threads": 1},
        "algorithm": {"correction": {"name": "truncate"}},
        "environments": {"own": {"name": "own.py:agent", "max_turns": 3, "max_tokens": 40}},
        "rollout": rollout,
    }
    write_config(home, "beside", config)
    outcome = run_here(home, "grpo", "beside.yaml")
    assert outcome.code == 0, outcome.err
    assert max(column(metrics(home / "beside"), "staleness/max")) <= 1
    found = episodes(home / "beside")
    assert len(found) == 3 * 2 * 4 and {len(t.turns) for t in found} >= {1, 5}
