"""gpt-oss trained from end to end: attention sinks, windows, experts with biases."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from choice import slow
from commands import GRPO, SFT, VLLM, column, metrics, run_here, write_config, write_task
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model

ROUNDING = 1e-5
"""Nats: what two orders of the same float32 sums differ by."""
LEARNED = ("sinks", "router.bias", "gate_up_proj_bias", "down_proj", "q_proj.bias")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A task of up to 16 tokens, and a random model whose first layer sees 4."""
    write_task(tmp_path)
    config = tiny_config(
        "gpt_oss", False, vocab=32, hidden=128, heads=4, kv_heads=2, feed_forward=64, window=4
    )
    config.initializer_range = 0.2
    write_tiny_model(tmp_path / "gpt", config, 0, make_tokenizer())
    return tmp_path


def trained(home: Path, name: str, config: dict[str, Any], *words: str) -> list[dict[str, Any]]:
    """Run a job of 4 steps; give its metrics. All kinds of weights moved, and the model loads."""
    config["run"] = {"directory": name, "steps": 4, "tensorboard": False}
    config["actor"]["model"] |= {"path": "gpt", "dtype": "float32"}
    write_config(home, name, config)
    outcome = run_here(home, name, f"{name}.yaml", *words)
    assert outcome.code == 0, outcome.err
    first, last = weights(home / "gpt"), weights(home / name / "model")
    assert first.keys() == last.keys()
    moved = [key for key, tensor in last.items() if not torch.equal(tensor, first[key])]
    for kind in LEARNED:
        assert any(key.endswith(kind) for key in moved), kind
    lm = AutoModelForCausalLM.from_pretrained(home / name / "model")
    assert all(torch.equal(tensor, last[key]) for key, tensor in lm.state_dict().items())
    return metrics(home / name)


def weights(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return found


def test_sft_learns_its_rows(home: Path) -> None:
    config = copy.deepcopy(SFT)
    del config["data"]["eval"]
    losses = column(trained(home, "sft", config), "loss")
    assert len(losses) == 4 and losses[-1] < losses[0]


def grpo() -> dict[str, Any]:
    config = copy.deepcopy(GRPO)
    config["batch"] = {"prompts": 4, "responses": 4, "micro_batch_tokens": 60}
    config["rewards"] = {"length": {"name": "length"}}
    config["rollout"] |= {"sampling": {"max_new_tokens": 8}}
    return config


def test_grpo_samples_from_the_weights_that_it_trains(home: Path) -> None:
    rows = trained(home, "grpo", grpo())
    assert max(column(rows, "sync/logprob_gap")) < ROUNDING


@pytest.mark.engine
@pytest.mark.parametrize("processes", [1, slow(2)])
def test_vllm_gets_all_experts_and_sinks(
    processes: int, home: Path, shared_ray: tuple[str, ...]
) -> None:
    """vLLM 0.32 copies them to where a reload loses them (`_by_loaders`)."""
    config = grpo()
    del config["cluster"]["where"]
    config["cluster"]["device"] = "cpu"
    config["rollout"] |= VLLM
    config["rollout"]["vllm"] = VLLM["vllm"] | {"tensor_parallel": processes}
    rows = trained(home, "grpo", config, *shared_ray)
    assert max(column(rows, "sync/logprob_gap")) < ROUNDING
