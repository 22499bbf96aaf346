"""PPO of a mixture of experts, whose engine has the trainer's weights after every sync, and whose
model is written by the names of Mixtral's own files: transformers has others in memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from commands import (
    PPO,
    VLLM,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from plimsoll.commands.demo import make_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDING = 1e-5
"""Nats: what two orders of the same float32 sums differ by."""


def write_mixture(path: Path) -> None:
    """A random one with float32 weights, which its routers do not spread evenly."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=15, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def test_engines_have_the_experts_that_were_sent(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    write_task(tmp_path)
    write_mixture(tmp_path / "mixture")
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "ppo", "steps": 2, "tensorboard": False}
    config["cluster"] = {"device": "cpu", "threads": 1}
    config["actor"]["model"] = {"path": "mixture", "dtype": "float32"}
    config["actor"]["optimizer"] = {"learning_rate": 0.01}
    config["rollout"] |= VLLM | {"dtype": "float32"}
    del config["data"]["eval"]
    write_config(tmp_path, "ppo", config)
    outcome = run_here(tmp_path, "ppo", "ppo.yaml", *shared_ray)
    assert outcome.code == 0, outcome.err
    gaps = column(metrics(tmp_path / "ppo"), "sync/logprob_gap")
    assert len(gaps) == 2 and max(gaps) < ROUNDING
    first, last = (
        load_file(tmp_path / name / "model.safetensors") for name in ("mixture", "ppo/model")
    )
    assert last.keys() == first.keys() and any("block_sparse_moe" in name for name in last)
    moved = [name for name, tensor in last.items() if not torch.equal(tensor, first[name])]
    assert any("experts.3.w2" in name for name in moved)
