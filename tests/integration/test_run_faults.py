"""Points of faults in a run on Ray: every process knows the faults, and which process it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import GRPO, run, write_config, write_task

pytestmark = pytest.mark.engine

NOTED = {
    "controller.start": {"controller"},
    "rank.start": {"rank=0", "rank=1"},
    "rank.backward": {"rank=0", "rank=1"},
    "rank.step": {"rank=0", "rank=1"},
    "checkpoint.file": {"rank=0", "rank=1"},
    "checkpoint.done": {"controller"},
    "engine.start": {"engine=0"},
    "engine.request": {"engine=0"},
    "engine.receive": {"engine=0"},
    "reward.call": {"controller"},
}


@pytest.mark.slow
def test_ranks_and_engines_reach_their_points(tmp_path: Path) -> None:
    write_task(tmp_path)
    config = GRPO | {
        "run": {"directory": "run", "steps": 1, "tensorboard": False},
        "cluster": {"ranks": 2, "threads": 1},
        "batch": {"prompts": 4, "responses": 2, "micro_batch_tokens": 32},
        "rewards": {"length": {"name": "length"}},
        "rollout": GRPO["rollout"] | {"sampling": {"max_new_tokens": 4}},
    }
    write_config(tmp_path, "grpo", config)
    environment = {
        "PLIMSOLL_FAULTS": ",".join(f"{point}:note" for point in NOTED),
        "PLIMSOLL_FAULTS_DIRECTORY": str(tmp_path / "faults"),
    }
    outcome = run(tmp_path, "grpo", "grpo.yaml", environment=environment)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(r) for r in (tmp_path / "faults" / "fired.jsonl").read_text().splitlines()]
    for point, processes in NOTED.items():
        assert {row["process"] for row in rows if row["fault"] == f"{point}:note"} == processes
    assert {row["step"] for row in rows if row["fault"] == "engine.request:note"} == {1}
    assert {row["step"] for row in rows if row["fault"] == "rank.step:note"} == {1}
    pids = {
        row["process"]: {r["pid"] for r in rows if r["process"] == row["process"]} for row in rows
    }
    assert all(len(found) == 1 for found in pids.values()) and len(pids) == 4
