"""RL of a mixture of experts, whose engine has the trainer's weights after every sync, and whose
model is written by the names of its family's own files: transformers has others in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from commands import (
    GRPO,
    PPO,
    VLLM,
    column,
    metrics,
    run_here,
    write_config,
    write_task,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from plimsoll.commands.demo import make_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDING = 1e-5
"""Nats: what two orders of the same float32 sums differ by."""


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 15,
    "initializer_range": 0.2,
}


def write_mixture(path: Path, config: PreTrainedConfig) -> None:
    """A random one with float32 weights, which its routers do not spread evenly."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def test_engines_have_the_experts_that_were_sent(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    write_task(tmp_path)
    write_mixture(tmp_path / "mixture", MixtralConfig(**SIZES, num_local_experts=4))
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


def test_experts_that_were_taken_are_learned_with(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    """Beside a run with live routers, from the same samples in its first step. Routers are frozen,
    prompts shared, layers recomputed, and the second update needs the log-probs before the first.
    """
    write_task(tmp_path)
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    sizes = SIZES | {"num_hidden_layers": 4, "num_key_value_heads": 1, "initializer_range": 0.15}
    mixture = Qwen3MoeConfig(**sizes | experts, head_dim=32, dtype="bfloat16")
    write_mixture(tmp_path / "mixture", mixture)
    found = {}
    for routing in ("sampled", "live"):
        run = copy.deepcopy(PPO)
        del run["critic"], run["data"]["eval"]
        run["run"] = {"directory": routing, "steps": 2, "tensorboard": False}
        run["cluster"] = {"device": "cpu", "threads": 1}
        run["batch"] = {"prompts": 6, "responses": 4, "micro_batch_tokens": 120}
        run["batch"]["share_prompts"] = True
        model_of = {"path": "mixture", "dtype": "bfloat16", "gradient_checkpointing": True}
        run["actor"] = {"model": model_of, "freeze": "router"}
        run["actor"]["optimizer"] = {"learning_rate": 0.001}
        run["algorithm"] = {"advantage": {"name": "grpo"}, "mini_batches": 2, "kl": None}
        run["rollout"] |= VLLM | {"routing": routing, "dtype": "bfloat16"}
        run["rollout"]["sampling"] = {"max_new_tokens": 16}
        write_config(tmp_path, routing, run)
        outcome = run_here(tmp_path, "rl", f"{routing}.yaml", *shared_ray)
        assert outcome.code == 0, outcome.err
        found[routing] = metrics(tmp_path / routing)
    assert column(found["sampled"], "rollout/rerouted") == [0.0, 0.0]
    assert min(column(found["sampled"], "rollout/rerouted_live")) > 0
    assert "rollout/rerouted" not in found["live"][0]
    with_taken, with_live = (found[name][0]["mismatch/k3"] for name in ("sampled", "live"))
    assert with_taken < 0.3 * with_live
    first, last = (
        load_file(tmp_path / name / "model.safetensors") for name in ("mixture", "sampled/model")
    )
    kept = {name for name, tensor in last.items() if torch.equal(tensor, first[name])}
    assert {name for name in last if "mlp.gate." in name} <= kept < set(last)
    exported = run_here(tmp_path, "export", "sampled", "--to", "exported", "--trust-run")
    assert exported.code == 0, exported.err
    for routing in found:
        file = next((tmp_path / routing / "trajectories").glob("*.parquet"))
        assert ("routing" in pq.read_schema(file).names) == (routing == "sampled")


@pytest.mark.parametrize("targets", [("all-linear",), ("all-linear", "experts")], ids=str)
def test_adapters_of_a_mixture_learn_merged_and_as_they_are(
    targets: tuple[str, ...], tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    """The engine samples with merged weights, the trainer learns with the adapter beside its own.

    `mismatch/abs` compares both, for each sampled token. The steps after a resume are on other
    ranks and at another stage.
    """
    write_task(tmp_path)
    experts = {"num_experts": 6, "moe_intermediate_size": 32, "head_dim": 32}
    write_mixture(tmp_path / "mixture", Qwen3MoeConfig(**SIZES, **experts))
    config = copy.deepcopy(GRPO)
    config["run"] = {"directory": "grpo", "steps": 6, "save_every": 3, "tensorboard": False}
    config["cluster"] = {"device": "cpu", "threads": 1, "ranks": 2}
    config["actor"] |= {
        "model": {"path": "mixture", "dtype": "float32", "gradient_checkpointing": True},
        "adapter": {"rank": 8, "alpha": 16.0, "targets": [*targets]},
        "zero": {"stage": 3},
        "optimizer": {"learning_rate": 0.02},
        "ema": {},
    }
    config["rewards"] = {"length": {"name": "length", "weight": -1.0}}
    config["batch"] = {"prompts": 8, "responses": 4, "micro_batch_tokens": 120}
    config["rollout"] |= VLLM | {"dtype": "float32", "sampling": {"max_new_tokens": 24}}
    write_config(tmp_path, "grpo", config)
    begun = run_here(tmp_path, "grpo", "grpo.yaml", "--run.steps", "3", *shared_ray)
    assert begun.code == 0, begun.err
    again = ["--run.resume", "auto", "--cluster.ranks", "1", "--actor.zero.stage", "1"]
    outcome = run_here(tmp_path, "grpo", "grpo.yaml", *again, *shared_ray)
    assert outcome.code == 0, outcome.err
    rows = metrics(tmp_path / "grpo")
    assert len(rows) == 6
    assert max(column(rows, "sync/logprob_gap")) < ROUNDING
    assert max(column(rows, "mismatch/abs")) < ROUNDING
    rewards = column(rows, "reward")
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
    saved = load_file(tmp_path / "grpo" / "model" / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * (4 + 2 * ("experts" in targets))
    assert all(tensor.any() for tensor in saved.values())
    merged = run_here(tmp_path, "merge", "grpo/model", "--out", "merged")
    assert merged.code == 0, merged.err
    first, last = (
        load_file(tmp_path / name / "model.safetensors") for name in ("mixture", "merged")
    )
    assert last.keys() == first.keys()
    moved = {name for name in last if not torch.equal(last[name], first[name])}
    assert len([n for n in moved if ".experts." in n]) == 2 * 6 * 3 * ("experts" in targets)
    exported = run_here(tmp_path, "export", "grpo", "--to", "exported", "--trust-run")
    assert exported.code == 0, exported.err
