"""Runs that are killed between sampling and the next checkpoint: nothing is sampled or scored
twice, and what goes on is the run that was never killed."""

from __future__ import annotations

import copy
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from choice import slow
from commands import GRPO, PPO, VLLM, cut_off, metrics, run, run_here, write_config, write_task

REWARD = '''
import os, signal
from pathlib import Path


def reward(trajectory):
    """Counts the calls, and kills the process at the one that is told."""
    calls = Path(os.environ.get("CALLS", "calls"))
    with calls.open("a") as file:
        file.write(f"{trajectory.prompt.text} {trajectory.response_text!r}\\n")
    number = len(calls.read_text().splitlines())
    if str(number) == os.environ.get("KILLED_AT_CALL"):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(trajectory.response_text) % 3)
'''
ENVIRONMENT = """
import asyncio, os, signal
from pathlib import Path
from plimsoll.environment.protocol import Step

class TwoTurns:
    def reset(self, row):
        self.turn = 0

    async def step(self, reply):
        self.turn += 1
        return Step("1+1=", self.turn == 2)

    async def get_reward(self):
        with Path("ended").open("a") as file:
            file.write("x")
        if str(Path("ended").stat().st_size) == os.environ.get("KILLED_AT_END"):
            await asyncio.sleep(1)  # those that ended before are kept
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5
"""
STEPS = 3


def config() -> dict[str, Any]:
    made = copy.deepcopy(PPO)
    made["run"] = {"directory": "whole", "steps": STEPS, "save_every": 2, "eval_every": 1}
    made["rewards"] = {"mine": {"name": "own_counted_reward.py:reward", "process": False}}
    made["rollout"]["transformers"] = {"max_sequences": 4}
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that nobody disturbed."""
    home = tmp_path_factory.mktemp("recorded")
    write_task(home)
    write_config(home, "ppo", config())
    (home / "own_counted_reward.py").write_text(REWARD)
    assert run_here(home, "ppo", "ppo.yaml").code == 0
    return home


def calls(home: Path, name: str) -> Counter[str]:
    return Counter((home / name).read_text().splitlines())


@pytest.mark.parametrize("at", [slow(5), 19, slow(33), slow(41)])
def test_nothing_that_ended_is_sampled_or_scored_twice(home: Path, at: int) -> None:
    """Killed by the reward at a call: in the first step, in evaluations, and in the last step."""
    name = f"killed-{at}"
    words = ("ppo", "ppo.yaml", "--run.directory", name)
    told = {"CALLS": f"{name}.calls", "KILLED_AT_CALL": str(at)}
    assert run(home, *words, environment=told).code == -signal.SIGKILL
    done = run(home, *words, "--run.resume", "auto", environment=told | {"KILLED_AT_CALL": ""})
    assert done.code == 0, done.err
    again = home / name
    assert metrics(again) == metrics(home / "whole")
    for file in sorted((home / "whole").glob("trajectories/*")):
        assert parquet.read_table(file) == parquet.read_table(again / "trajectories" / file.name)
    weights = [(r / "model" / "model.safetensors").read_bytes() for r in (again, home / "whole")]
    assert weights[0] == weights[1]
    twice = calls(home, f"{name}.calls") - calls(home, "calls")
    # The requests whose responses were being scored when the process was killed are asked again.
    assert sum(twice.values()) <= 8
    assert not (again / "journal.bin").exists()


@pytest.mark.parametrize(
    ("point", "step", "kept"),
    [
        ("rollouts.begin", 3, "true"),
        ("rollouts.begin", 2, "{last: 1}"),
        slow("rollouts.write", 3, "{last: 1}"),
    ],
)
def test_a_kill_while_a_step_is_written_beside_its_training_loses_nothing(
    home: Path, point: str, step: int, kept: str
) -> None:
    """The journal holds what was sampled until the file is whole: nothing is scored twice. The
    files of steps after the last checkpoint stay, also where few are kept."""
    name = f"killed-{point}-{step}"
    words = ("ppo", "ppo.yaml", "--run.directory", name, "--run.keep_trajectories", kept)
    told = {"CALLS": f"{name}.calls", "PLIMSOLL_FAULTS": f"{point}:kill:step={step}"}
    assert run(home, *words, environment=told).code == -signal.SIGKILL
    told["PLIMSOLL_FAULTS"] = ""
    done = run(home, *words, "--run.resume", "auto", environment=told)
    assert done.code == 0, done.err
    again = home / name
    assert metrics(again) == metrics(home / "whole")
    left = sorted(again.glob("trajectories/*"))
    assert len(left) == (3 if kept == "true" else 1)
    for file in left:
        assert parquet.read_table(file) == parquet.read_table(
            home / "whole/trajectories" / file.name
        )
    weights = [(r / "model" / "model.safetensors").read_bytes() for r in (again, home / "whole")]
    assert weights[0] == weights[1]
    assert calls(home, f"{name}.calls") == calls(home, "calls")
    assert not [item.name for item in (again / "trajectories").glob(".*")]


@pytest.mark.engine
@pytest.mark.slow
def test_an_episode_that_ended_is_not_played_again_though_its_group_goes_on(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "own_two_turns.py").write_text(ENVIRONMENT)
    made = copy.deepcopy(GRPO) | {
        "run": {"directory": "run", "steps": 2},
        "batch": {"prompts": 2, "responses": 4, "micro_batch_tokens": 400},
        "environments": {"turns": {"name": "own_two_turns.py:TwoTurns", "max_turns": 3}},
    }
    made["environments"]["turns"] |= {"max_tokens": 40, "process": False}
    made["rollout"] |= VLLM | {"sampling": {"max_new_tokens": 4}}
    made["cluster"] = {"where": "ray", "threads": 1}
    write_config(tmp_path, "grpo", made)
    killed = run(tmp_path, "grpo", "grpo.yaml", environment={"KILLED_AT_END": "7"})
    assert killed.code == -signal.SIGKILL, killed.err
    done = run(tmp_path, "grpo", "grpo.yaml", "--run.resume", "auto")
    assert done.code == 0, done.err
    # The episode that killed the process was not kept yet.
    assert len((tmp_path / "ended").read_text()) == 2 * 2 * 4 + 1


@pytest.mark.slow
def test_other_settings_sample_anew(home: Path) -> None:
    name = "changed"
    words = ("ppo", "ppo.yaml", "--run.directory", name, "--run.save_every", "null")
    told = {"CALLS": f"{name}.calls", "KILLED_AT_CALL": "41"}
    assert run(home, *words, environment=told).code == -signal.SIGKILL
    stored = sorted((home / name / "trajectories").iterdir())
    assert stored
    before = calls(home, f"{name}.calls")
    flags = ("--run.resume", "auto", "--actor.optimizer.learning_rate", "0.003")
    done = run(home, *words, *flags, environment=told | {"KILLED_AT_CALL": ""})
    assert done.code == 0, done.err
    assert "learn from trajectories/" not in done.out
    assert sum((calls(home, f"{name}.calls") - before).values()) > sum(before.values())


def test_a_damaged_file_of_a_step_is_sampled_anew(home: Path) -> None:
    cut_off(home / "whole", home / "torn", 2)
    file = home / "torn" / "trajectories" / "step-000003.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    outcome = run_here(home, "ppo", "ppo.yaml", "--run.directory", "torn", "--run.resume", "auto")
    assert outcome.code == 0, outcome.err
    assert metrics(home / "torn") == metrics(home / "whole")
    assert parquet.read_table(file).num_rows


@pytest.mark.engine
@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_scores_no_whole_group_twice(tmp_path: Path) -> None:
    """Groups that waited in the buffer are read back, too; the command itself starts it again."""
    write_task(tmp_path)
    (tmp_path / "own_counted_reward.py").write_text(REWARD)
    made = copy.deepcopy(GRPO) | {
        "run": {"directory": "run", "steps": 5, "save_every": 2},
        "cluster": {"where": "ray", "threads": 1},
        "batch": {"prompts": 2, "responses": 2, "micro_batch_tokens": 400},
        "rewards": {"mine": {"name": "own_counted_reward.py:reward"}},
    }
    made["rollout"] |= {"staleness": 1, "sampling": {"max_new_tokens": 8}}
    made["rollout"]["transformers"] = {"max_sequences": 2}
    write_config(tmp_path, "grpo", made)
    told = {"CALLS": "calls", "KILLED_AT_CALL": "13"}
    outcome = run(tmp_path, "grpo", "grpo.yaml", environment=told, supervised=True)
    assert outcome.code == 0 and "started again" in outcome.err, outcome.err

    lines = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    before, after = Counter(lines[:13]), Counter(lines[13:])
    # The kill may come between the score of a group's last response and its record.
    assert sum(before[prompt] == 2 for prompt in before.keys() & after.keys()) <= 1
    files = sorted((tmp_path / "run" / "trajectories").glob("*"))
    learned = Counter(p for f in files for p in parquet.read_table(f)["prompt"].to_pylist())
    assert learned.total() == 5 * 2 * 2 and set(learned.values()) == {2}
