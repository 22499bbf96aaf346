"""PPO of a mixture of experts, whose engine has the trainer's weights after every sync, and whose
model is written by the names of Mixtral's own files: transformers has others in memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow.parquet as pq
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
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

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


def test_experts_that_were_taken_are_learned_with(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    """Beside a run with live routers, from the same samples in its first step. Routers are frozen,
    prompts shared, layers recomputed, and the second update needs the log-probs before the first.
    """
    write_task(tmp_path)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=15, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "mixture")
    make_tokenizer().save_pretrained(tmp_path / "mixture")
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
    for routing in found:
        file = next((tmp_path / routing / "trajectories").glob("*.parquet"))
        assert ("routing" in pq.read_schema(file).names) == (routing == "sampled")
