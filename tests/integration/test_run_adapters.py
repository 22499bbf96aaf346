"""Runs with adapters: SFT, and PPO on two ZeRO-3 ranks with a vLLM engine, over bases of 16 and of
4 bits; what a run saves is an adapter, which merges into a plain model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from commands import (
    PPO,
    SFT,
    VLLM,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)
from safetensors.torch import load_file
from test_run_pairs import DPO, write_pairs

STEPS = 2
ADAPTER = {"rank": 4, "alpha": 8.0}


def adapted_ppo(quantization: str) -> dict[str, Any]:
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": None, "eval_every": None}
    del config["data"]["eval"]
    config["cluster"] |= {"ranks": 2}
    config["rollout"] |= VLLM
    for role in ("actor", "critic"):
        config[role] |= {"zero": {"stage": 3}, "adapter": ADAPTER}
        config[role]["optimizer"] = {"learning_rate": 0.05}
        config[role]["model"] = {"path": "model", "quantization": quantization}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    write_task(home)
    return home


@pytest.mark.engine
@pytest.mark.parametrize(("quantization", "way"), [slow("none", "separate"), slow("nf4", "merged")])
def test_ppo_with_an_adapter(
    home: Path, quantization: str, way: str, shared_ray: tuple[str, ...]
) -> None:
    base = (home / "model" / "model.safetensors").read_bytes()
    config = adapted_ppo(quantization)
    config["run"]["directory"] = quantization
    config["rollout"]["vllm"] = VLLM["vllm"] | {"adapter": way}
    write_config(home, quantization, config)
    outcome = run_here(home, "ppo", f"{quantization}.yaml", *shared_ray)
    assert outcome.code == 0, outcome.err
    rows = metrics(home / quantization)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert all(np.isfinite(value) for value in row.values())
        # Bounds of rounding in bfloat16; a stale or misnamed weight gives several tenths.
        assert row["sync/logprob_gap"] < 0.02 and row["mismatch/abs"] < 0.02
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    # The reference is the actor with its adapter off: exactly the actor, until it has learned.
    first, second = column(rows, "kl")
    assert first == 0 and abs(second) > 0.02  # of a few tokens, k1 has either sign
    assert (home / "model" / "model.safetensors").read_bytes() == base
    saved = load_file(home / quantization / "model" / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 7 and all(".lora_" in name for name in saved)
    assert all(tensor.abs().max() > 0 for tensor in saved.values())


def test_dpo_compares_with_the_actor_without_its_adapter(home: Path) -> None:
    write_pairs(home / "pairs.jsonl", 40, seed=0)
    config = copy.deepcopy(DPO)
    config["run"] = {"directory": "dpo", "steps": 6}
    del config["data"]["eval"]
    config["actor"] |= {"adapter": ADAPTER}
    config["actor"]["model"] = {"path": "model", "dtype": "float32", "quantization": "nf4"}
    config["actor"]["optimizer"] = {"learning_rate": 0.02}
    write_config(home, "dpo", config)
    outcome = run_here(home, "dpo", "dpo.yaml")
    assert outcome.code == 0, outcome.err
    losses = column(metrics(home / "dpo"), "loss")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-7)  # the actor still is its reference
    assert losses[-1] < 0.6
    assert (home / "dpo" / "model" / "adapter_config.json").is_file()


def test_sft_with_an_adapter_resumes_and_merges(home: Path) -> None:
    config = copy.deepcopy(SFT)
    config["run"] |= {"steps": 4, "save_every": 2, "eval_every": 4, "keep_checkpoints": 2}
    config["actor"] |= {"adapter": ADAPTER | {"targets": ["q_proj", "down_proj"]}}
    config["actor"]["model"]["quantization"] = "nf4"
    write_config(home, "sft", config)
    straight = run_here(home, "sft", "sft.yaml")
    half = ["sft", "sft.yaml", "--run.directory", "half"]
    begun = run_here(home, *half, "--run.steps", "2", "--run.eval_every", "2")
    resumed = run_here(home, *half, "--run.resume", "auto")
    assert [one.code for one in (straight, begun, resumed)] == [0, 0, 0], resumed.err
    assert (
        column(metrics(home / "sft"), "eval/loss")[-1]
        == column(metrics(home / "half"), "eval/loss")[-1]
    )

    merged = run_here(
        home,
        *("merge", "sft/model", "--out", "merged", "--dtype", "float32"),
        *("--quantization", "nf4"),
    )
    assert merged.code == 0, merged.err
    first = load_file(home / "model" / "model.safetensors")
    result = load_file(home / "merged" / "model.safetensors")
    assert result.keys() == first.keys()
    assert torch.equal(result["model.norm.weight"], first["model.norm.weight"])
    again = run_here(home, "merge", "sft/model", "--out", "merged")
    assert again.code == 2 and "merged is there already" in again.err
