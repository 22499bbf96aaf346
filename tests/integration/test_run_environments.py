"""Episodes in real runs: exact tokens, rewards by turn, and environments that fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import (
    GRPO,
    VLLM,
    Outcome,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)

from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS, PROMPTS, RESPONSES = 2, 4, 4
SAID = "1+1="
CONFIG: dict[str, Any] = GRPO | {
    "run": {"directory": "run", "steps": STEPS, "tensorboard": False},
    "data": GRPO["data"]
    | {"eval": {"path": "held_out.jsonl", "prompt": "prompt", "reference": "answer"}},
    "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 128},
    "rollout": GRPO["rollout"]
    | {
        "transformers": {"max_sequences": 8},
        "sampling": {"max_new_tokens": 6, "stop": ["1", "3", "5", "7", "9"]},
    },
    "environments": {
        "turns": {"name": "own_turns.py:Turns", "max_turns": 3, "max_tokens": 40},
    },
}
ENVIRONMENT = """
import asyncio, os
DIES = "plimsoll.environment.local" in open("/proc/self/cmdline").read()
from plimsoll.environment.protocol import Step

class Turns:
    '''Speaks twice, and rewards each turn by its length.'''

    def reset(self, row):
        self.turn, self.row = 0, row

    async def step(self, reply):
        self.turn += 1
        return Step("1+1=", self.turn == 3, reward=len(reply.text), figures={"spoken": 1})

    def get_reward(self):
        return 0.5


class Failing(Turns):
    '''Of some rows, what no environment should do.'''

    def reset(self, row):
        super().reset(row)
        if row["prompt"] == "0+1=":
            raise KeyError("door")

    async def step(self, reply):
        match self.row["prompt"]:
            case "0+3=":
                return 7
            case "1+0=":
                await asyncio.sleep(60)
            case "1+3=":
                DIES and os._exit(3)
            case "2+1=":
                DIES and os.kill(os.getpid(), 9)
            case "1+2=":
                return "1" * 10_000_000, False
        return await super().step(reply)

    def get_reward(self):
        return float("nan") if self.row["prompt"] == "2+0=" else 0.5
"""
FAILING = {"0+1=", "0+3=", "1+0=", "2+0="}
DYING = {"1+3=", "2+1="}
"""In a process of their own alone."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("environments")
    write_task(home)
    (home / "own_turns.py").write_text(ENVIRONMENT)
    return home


def train(home: Path, name: str, config: dict[str, Any], *flags: str) -> Outcome:
    write_config(home, name, config | {"run": CONFIG["run"] | {"directory": name}})
    return run_here(home, "grpo", f"{name}.yaml", *flags)


def episodes(run: Path) -> list[list[Trajectory]]:
    return [read_trajectories(path) for path in RunDirectory(run).trajectories().values()]


def check_episode(t: Trajectory) -> None:
    """Turns cover the tokens, only sampled ones are learned, rewards stand where they belong."""
    assert [turn.begin for turn in t.turns] == [0, *(turn.end for turn in t.turns[:-1])]
    assert t.turns[-1].end == len(t.response_tokens)
    for turn in t.turns:
        assert set(t.loss_mask[turn.begin : turn.end]) == {turn.role == "assistant"}
        assert turn.role == "assistant" or turn.text == SAID
    spoken = [turn for turn in t.turns if turn.role == "assistant"]
    assert t.figures["turns"] == len(spoken)
    assert t.token_rewards is not None
    at = {turn.end - 1: turn.reward for turn in spoken}
    last = spoken[-1].end - 1
    assert t.token_rewards[last] == at.pop(last) + 0.5
    assert {i: r for i, r in enumerate(t.token_rewards) if i in at} == at
    [part] = t.rewards
    assert (part.name, part.value) == ("environment", float(t.token_rewards.sum()))
    if t.finish_reason == "stop":
        assert len(spoken) == 3 and t.figures["spoken"] == 3


def test_a_local_run_learns_from_exact_episodes_and_repeats_itself(home: Path) -> None:
    assert train(home, "local", CONFIG, "--run.eval_every", "2").code == 0
    found = episodes(home / "local")
    assert [len(step) for step in found] == [PROMPTS * RESPONSES] * STEPS
    for step in found:
        for t in step:
            check_episode(t)
    assert {t.finish_reason for step in found for t in step} == {"stop", "length"}
    assert max(column(metrics(home / "local"), "mismatch/abs")) < 1e-4
    shown = run_here(home, "rollouts", "local", "--group", "0").out
    assert "[assistant, reward " in shown and f"[user] {SAID}" in shown
    evaluated = column(metrics(home / "local"), "eval/environment")  # before and after
    assert len(evaluated) == 2 and min(evaluated) > 0
    assert train(home, "again", CONFIG, "--run.eval_every", "2").code == 0
    again = episodes(home / "again")
    assert [[t.response_tokens.tolist() for t in step] for step in found] == [
        [t.response_tokens.tolist() for t in step] for step in again
    ]


@pytest.mark.slow
def test_vllm_plays_them_on_ray_and_a_critic_credits_turns(
    home: Path, shared_ray: tuple[str, ...]
) -> None:
    config = CONFIG | {
        "critic": {"model": {"path": "model", "dtype": "float32"}},
        "algorithm": {"advantage": {"name": "gae_turns"}, "mini_batches": 2},
        "rollout": CONFIG["rollout"] | VLLM,
        "cluster": {"where": "ray", "threads": 1},
    }
    write_config(home, "vllm", config | {"run": CONFIG["run"] | {"directory": "vllm"}})
    outcome = run_here(home, "rl", "vllm.yaml", *shared_ray)
    assert outcome.code == 0, outcome.err
    for step in episodes(home / "vllm"):
        assert len(step) == PROMPTS * RESPONSES
        for t in step:
            check_episode(t)
    assert max(column(metrics(home / "vllm"), "mismatch/abs")) < 1e-3


@pytest.mark.parametrize("process", [False, True])
def test_a_group_whose_environment_fails_is_replaced_and_counted(
    home: Path, tmp_path: Path, process: bool
) -> None:
    failing = FAILING | (DYING if process else set())
    own = CONFIG["environments"]["turns"] | {
        "name": "own_turns.py:Failing",
        "call_seconds": 8.0,  # also on a busy machine
        "retries": 0,
        "process": process,
    }
    config = CONFIG | {
        "environments": {"turns": own},
        "batch": CONFIG["batch"] | {"max_failed_groups": 1.0},
        "data": {**CONFIG["data"], "shuffle": False},
    }
    name = f"failing-{tmp_path.name}"
    outcome = train(home, name, config, "--run.steps", "2")
    assert outcome.code == 0, outcome.err
    failed = column(metrics(home / name), "groups/failed")
    assert sum(failed) == len(failing)
    found = episodes(home / name)
    assert [len(step) for step in found] == [PROMPTS * RESPONSES] * 2
    prompts = [t.prompt.text for step in found for t in step]
    assert not failing & set(prompts)
    [flooded] = {
        t.response_tokens.shape[0] <= 40 for s in found for t in s if t.prompt.text == "1+2="
    }
    assert flooded


def test_beyond_the_bound_the_run_stops_and_says_what_failed(home: Path) -> None:
    own = CONFIG["environments"]["turns"] | {"name": "own_turns.py:Failing", "retries": 0}
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    bad = [row for row in rows if row["prompt"] in ("0+1=", "0+3=")]
    (home / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad * 2))
    data = {**CONFIG["data"], "train": {**CONFIG["data"]["train"], "path": "bad.jsonl"}}
    outcome = train(home, "stops", CONFIG | {"environments": {"turns": own}, "data": data})
    assert outcome.code == 1
    assert re.search("environments .* 2 groups of a step of 4", outcome.err)
    assert "The environment 'turns', at row " in outcome.err
    assert "raised KeyError: 'door'" in outcome.err or "'s step gave 7 (int)" in outcome.err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "calculater"}, "Did you mean 'calculator'?"),
        ({"name": "nowhere.py:Turns"}, "nowhere.py"),
        ({"name": "own_turns.py:Turn"}, "Did you mean 'Turns'?"),
        ({"options": {"hard": True}}, "has no option 'hard'"),
        ({"max_tokens": 5}, "[environment-length]"),
        ({"memory_gib": 2.0}, "[environment-memory]"),
        ({"name": "calculator", "tool_format": "none"}, "no reply calls one"),
        ({"name": "calculator"}, "environments.turns.describe_tools: false"),
    ],
)
def test_unusable_environments_are_refused_before_anything_is_loaded(
    home: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    own = CONFIG["environments"]["turns"] | changed
    outcome = train(home, tmp_path.name, CONFIG | {"environments": {"turns": own}})
    assert outcome.code in (2, 4) and said in outcome.err, outcome.err
