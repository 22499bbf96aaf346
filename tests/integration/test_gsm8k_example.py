"""The GSM8K example from the data to a model that PPO trained, with its own configs, shrunken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from commands import run_here
from transformers import AutoModelForCausalLM

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "examples" / "gsm8k"
DATA = Path(os.environ.get("PLIMSOLL_DATA", PROJECT.parent / "shared" / "data")) / "gsm8k"
RUNS = Path("runs") / "gsm8k"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((DATA / f"{split}.jsonl").is_file() for split in ("train", "test")),
        reason=f"GSM8K is not in {DATA}; set PLIMSOLL_DATA to the folder that holds gsm8k/",
    ),
]


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example ran: prepare.py, two steps of SFT, one of PPO in one process."""
    home = tmp_path_factory.mktemp("gsm8k")
    prepare = ["--vocabulary", "2048", "--hidden", "64", "--layers", "2"]
    script = [str(EXAMPLE / "prepare.py"), "--data", str(DATA), "--out", str(RUNS), *prepare]
    subprocess.run([sys.executable, *script], cwd=home, check=True, timeout=240)
    sft = ["--run.steps", "2", "--batch.sequences", "8", "--data.train.limit", "64"]
    sft += ["--actor.optimizer.warmup_steps", "0"]
    loss_mask = run_here(home, "sft", str(EXAMPLE / "sft.yaml"), *sft)
    assert loss_mask.code == 0, loss_mask.err
    ppo = ["--cluster.where", "local", "--rollout.transformers", "{}"]
    ppo += ["--run.steps", "1", "--run.eval_every", "1", "--batch.prompts", "4"]
    ppo += ["--data.train.limit", "16", "--data.eval.limit", "4"]
    ppo += ["--rollout.sampling.max_new_tokens", "16", "--data.over_long", "truncate"]
    ppo += ["--actor.optimizer.warmup_steps", "0"]
    loss_mask = run_here(home, "ppo", str(EXAMPLE / "ppo.yaml"), *ppo)
    assert loss_mask.code == 0, loss_mask.err
    return home


def test_all_problems_are_there(home: Path) -> None:
    counts = {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (home / RUNS / f"{split}.jsonl").open()]
        counts[split] = len(rows)
        for row in rows:
            assert list(row) == ["question", "response", "answer"]
            assert row["question"].startswith("Question: ") and row["question"].endswith(
                "\nAnswer:"
            )
            assert row["response"].endswith(f"\n#### {row['answer']}\n")
            assert "<<" not in row["response"]
            float(row["answer"])
    assert counts == {"train": 7473, "test": 1319}


def test_sft_leaves_a_run_and_a_model(home: Path) -> None:
    directory = home / RUNS / "sft"
    rows = metrics(directory)
    assert [row["step"] for row in rows] == [1, 2]
    # Untrained, all 2,048 tokens are about equally likely.
    assert rows[0]["loss"] == pytest.approx(math.log(2048), abs=0.5)
    assert rows[1]["loss"] < rows[0]["loss"]
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (2, 2048)
    assert (directory / "config.yaml").is_file()
    assert (directory / "checkpoints" / "step-000002" / "actor").is_dir()


def test_ppo_leaves_a_run_with_both_parts_of_the_reward(home: Path) -> None:
    directory = home / RUNS / "ppo"
    last = metrics(directory)[-1]
    assert last["step"] == 1
    for name in ("reward/right", "reward/well_formed", "eval/right", "eval/well_formed"):
        assert 0 <= last[name] <= 1, name
    sampled = parquet.read_table(directory / "trajectories" / "step-000001.parquet")
    assert sampled.num_rows == 4
    for role in ("actor", "critic"):
        assert (directory / "checkpoints" / "step-000001" / role).is_dir()
    assert (directory / "model" / "model.safetensors").is_file()
