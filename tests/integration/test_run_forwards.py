"""No forward of a run is larger than the one that the plan prices: not for held-out rows, of which
there are more than a step has, nor for trajectories, which a reward model reads all at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from commands import PPO, run_here, write_config, write_task
from test_run_reward import prm_config, rm_config

from plimsoll.jobs import JOBS
from plimsoll.model.policy import PackTensors
from plimsoll.records import Pack
from plimsoll.resolve.load import load_spec

ROWS = 24
"""Many times what a step of these runs has."""


def write_rows(home: Path) -> None:
    write_task(home)
    rows = [
        {
            "prompt": f"{i % 10}+1=",
            "response": f"{i % 7}",
            "chosen": "2",
            "rejected": "13",
            "steps": ["2", "4"],
            "labels": [True, False],
            "label": i % 2 == 0,
        }
        for i in range(ROWS)
    ]
    (home / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_steps(
    base: dict[str, Any], columns: dict[str, str], batch: dict[str, int]
) -> dict[str, Any]:
    source = {"path": "many.jsonl", "prompt": "prompt", **columns}
    return {
        "run": {"directory": "out", "steps": 1, "eval_every": 1, "tensorboard": False},
        "cluster": base["cluster"],
        "data": base["data"] | {"train": source, "eval": source, "max_tokens": 8},
        "batch": {**batch, "micro_batch_tokens": 4096},
        "actor": {"model": {"path": "model"}},
    }


PAIR = {"chosen": "chosen", "rejected": "rejected"}
CONFIGS: dict[str, dict[str, Any]] = {
    "sft": small_steps(PPO, {"response": "response"}, {"sequences": 2}),
    "dpo": small_steps(PPO, PAIR, {"pairs": 1}),
    "kto": small_steps(PPO, {"response": "response", "label": "label"}, {"sequences": 2}),
    "rm": small_steps(rm_config(), PAIR, {"pairs": 1}),
    "prm": small_steps(prm_config(), {"steps": "steps", "labels": "labels"}, {"sequences": 2}),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every pack that a rank is given."""
    tokens: list[int] = []
    made = PackTensors.from_pack

    def noted(pack: Pack, *options: Any) -> PackTensors:
        tokens.append(len(pack.tokens_T))
        return made(pack, *options)

    monkeypatch.setattr(PackTensors, "from_pack", noted)
    return tokens


def planned(home: Path, job: str, config: dict[str, Any]) -> int:
    """Run the job; tokens of a rank's largest forward, by the plan."""
    name = write_config(home, job, config).name
    assert run_here(home, job, name).code == 0
    return load_spec(JOBS[job], str(home / name)).workload.largest_pack(1)


@pytest.mark.parametrize("job", CONFIGS)
def test_held_out_rows_are_packed_no_larger(job: str, tmp_path: Path, seen: list[int]) -> None:
    write_rows(tmp_path)
    limit = planned(tmp_path, job, CONFIGS[job])
    assert limit == 16 and max(seen) <= limit and len(seen) > ROWS / 4


def test_a_reward_model_reads_no_more_than_a_mini_batch(tmp_path: Path, seen: list[int]) -> None:
    write_rows(tmp_path)
    planned(tmp_path, "rm", CONFIGS["rm"])
    seen.clear()
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "ppo", "steps": 1, "tensorboard": False}
    config["batch"]["micro_batch_tokens"] = 4096
    config["reward_model"] = {"role": {"model": {"path": "out/model"}}}
    del config["data"]["eval"]
    limit = planned(tmp_path, "ppo", config)
    assert limit == 96 and max(seen) <= limit
