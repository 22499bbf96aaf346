"""Runs whose engine is killed: another takes its place, and the run goes on as it would have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from choice import slow
from commands import GRPO, VLLM, Command, metrics, run, run_here, wait_for, write_config, write_task
from safetensors.torch import load_file

pytestmark = pytest.mark.engine

STEPS = 6
REWARD = """
import time


def reward(trajectory):
    time.sleep(0.05)  # so that a step is long enough to be killed in
    return float(len(trajectory.response_text) % 3)
"""


def config(engine: str, staleness: int) -> dict[str, Any]:
    made = copy.deepcopy(GRPO) | {
        "preset": "grpo",
        "run": {"directory": "whole", "steps": STEPS},
        "cluster": {"where": "ray", "threads": 1},
        "batch": {"prompts": 4, "responses": 2, "micro_batch_tokens": 400},
        "rewards": {"slow": {"name": "own_slow_reward.py:reward"}},
    }
    made["rollout"] |= {"staleness": staleness, "sampling": {"max_new_tokens": 24}}
    made["rollout"] |= VLLM if engine == "vllm" else {"transformers": {"max_sequences": 2}}
    return made


@pytest.mark.parametrize(
    ("engine", "staleness", "process"),
    [
        ("transformers", 0, "ray::EngineActor"),
        slow("vllm", 0, "VLLM::EngineCore"),
        slow("vllm", 1, "VLLM::EngineCore"),
    ],
)
def test_an_engine_that_is_killed_is_started_again(
    engine: str, staleness: int, process: str, tmp_path: Path
) -> None:
    write_task(tmp_path)
    write_config(tmp_path, "grpo", config(engine, staleness))
    (tmp_path / "own_slow_reward.py").write_text(REWARD)
    command = Command(tmp_path, "grpo", "grpo.yaml", "--run.directory", "killed")
    try:
        first = tmp_path / "killed" / "trajectories" / "step-000002.parquet"
        wait_for(first.exists, "the second step")
        command.find(process)[-1].kill()
        outcome = command.finish()
    finally:
        command.kill_all()
    assert outcome.code == 0, outcome.err
    assert (
        "rollout engine 0" in outcome.out and "The engine is started again (1 of 3" in outcome.out
    )
    rows = metrics(tmp_path / "killed")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    if staleness:
        return
    assert run_here(tmp_path, "grpo", "grpo.yaml").code == 0
    assert rows == metrics(tmp_path / "whole")
    paths = [tmp_path / name / "model" / "model.safetensors" for name in ("killed", "whole")]
    killed, whole = map(load_file, paths)
    assert all(killed[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize("engine", [slow("transformers"), slow("vllm")])
def test_an_engine_that_runs_out_of_memory_samples_fewer_sequences_at_once(
    engine: str, tmp_path: Path
) -> None:
    """Down to one; then the run ends."""
    write_task(tmp_path)
    made = config(engine, 0)
    made["rollout"] |= {engine: {**made["rollout"][engine], "max_sequences": 4}}
    write_config(tmp_path, "grpo", made)
    (tmp_path / "own_slow_reward.py").write_text(REWARD)
    told = {"PLIMSOLL_FAULTS": "engine.request:oom:step=2+once,engine.request:oom:step=4+once"}
    told["PLIMSOLL_FAULTS_DIRECTORY"] = str(tmp_path / "faults")
    outcome = run(tmp_path, "grpo", "grpo.yaml", environment=told)
    assert outcome.code == 0, outcome.err
    assert "at most 2 sequences at once, not 4" in outcome.out
    assert "at most 1 sequence at once, not 2" in outcome.out
    assert [row["step"] for row in metrics(tmp_path / "whole")] == [*range(1, STEPS + 1)]
    told["PLIMSOLL_FAULTS"] = "engine.request:oom:step=2"
    outcome = run(tmp_path, "grpo", "grpo.yaml", "--run.directory", "no", environment=told)
    assert outcome.code == 1 and "rollout engine 0" in outcome.err
    assert outcome.out.count(" at once, not ") == 2
