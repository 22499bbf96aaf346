"""PPO on Ray with ranks and engines on cards: weights go by NCCL and by CUDA IPC."""

from __future__ import annotations

import copy
from pathlib import Path

import fakecard
import numpy as np
import pytest
from commands import PPO, Command, metrics, wait_for, write_config, write_task

STEPS = 2
ENVIRONMENT = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 4}'}
"""Ray asks NVIDIA's library for cards, of which the one of these tests is not a part."""
EVERY_PROCESS = Path(fakecard.__file__).parents[1] / "every_process"


@pytest.mark.parametrize(("route", "engines"), [("nccl", 1), ("ipc", 2)])
def test_ppo_on_two_ranks(route: str, engines: int, tmp_path: Path) -> None:
    """With NCCL to an engine on a card of its own; with IPC to engines on the ranks' cards."""
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": STEPS, "eval_every": STEPS}
    config["cluster"] |= {"where": "ray", "device": "cuda", "ranks": 2}
    config["rollout"] |= {
        "engines": engines,
        "placement": "shared" if route == "ipc" else "own",
        "sync": {"route": route},
        "dtype": "float32",
    }
    for role in ("actor", "critic"):
        config[role]["zero"] = {"stage": 3}
        config[role]["model"]["dtype"] = "float32"
    write_task(tmp_path)
    write_config(tmp_path, "ppo", config)
    path = {"PYTHONPATH": f"{tmp_path}:{EVERY_PROCESS}"}
    command = Command(tmp_path, "ppo", "ppo.yaml", environment=ENVIRONMENT | path)
    outcome = command.finish()
    assert outcome.code == 0, outcome.err
    wait_for(lambda: not command.processes(), "the end of all processes of the run")
    rows = metrics(tmp_path / "ppo")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(np.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        assert row[f"sync/bytes/{route}"] > 0 and row["sync/logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0
