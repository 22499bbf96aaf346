"""vLLM's routers and the trainer's round otherwise in bfloat16; with the experts that vLLM took,
the trainer's log-probs are those that were sampled from, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from decided import decided_model, decided_role
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.machine.host import free_port
from plimsoll.records import Prompt, Trajectory, from_packed
from plimsoll.rl.layout import lay_out
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
QWEN = Qwen3MoeConfig(**SIZES, num_experts=16, moe_intermediate_size=32, norm_topk_prob=True)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=16, intermediate_size=32, sliding_window=40)
PROMPTS, RESPONSES = 8, 3


def sample(path: Path) -> list[Trajectory]:
    """Responses of different lengths; a request is computed while others are, and the same prompt
    several times."""
    rollout = RolloutConfig(dtype="bfloat16", routing="sampled").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, max_sequences=5)
    )
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(i, rng.integers(0, 256, 5 + 3 * i).astype(np.int32), "?") for i in range(PROMPTS)
    )
    limits = tuple(range(20, 20 + PROMPTS))
    with started(EngineSpec(0, str(path), 128, 1, "cpu", rollout)) as (engine, loop):
        request = Request(prompts, RESPONSES, SamplingConfig(max_new_tokens=64), 7, limits)
        sampled = loop.run(engine.generate(request))
        loop.run(engine.log_probs([np.arange(9)]))
    return sampled


def gaps(worker: Worker, sampled: Sequence[Trajectory]) -> np.ndarray:
    """The trainer's log-probs minus vLLM's, of all tokens; prompts are shared."""
    members, beside = np.arange(len(sampled)), [t.prompt.index for t in sampled]
    [mini] = lay_out(sampled, [members], 1, 300, beside=beside)
    scores = from_packed(mini.packs[0], worker.log_probs("actor", mini.packs[0]))
    pairs = zip(scores, sampled, strict=True)
    return np.concatenate([own - t.sampler_logprobs for own, t in pairs])


@pytest.mark.parametrize("config", [QWEN, slow(GPT_OSS)], ids=["qwen3_moe", "gpt_oss"])
def test_log_probs_are_those_of_the_experts_that_were_taken(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    sampled = sample(tmp_path)
    for t in sampled:
        tokens = len(t.prompt.tokens) + len(t.response_tokens)
        assert t.routing is not None and t.routing.dtype == np.uint8
        assert t.routing.shape == (tokens - 1, 4, 4) and t.routing.max() < 16
        assert all(len({*row}) == 4 for row in t.routing.reshape(-1, 4).tolist())
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    role = TrainedRole(model=decided_model(path=str(tmp_path), dtype="bfloat16"))
    worker.load_model("actor", decided_role(role))
    taken, live = gaps(worker, sampled), gaps(worker, [replace(t, routing=None) for t in sampled])
    worker.stop()
    kl_taken, kl_live = (np.mean(np.exp(each) - 1 - each) for each in (taken, live))
    assert np.abs(taken).mean() < 0.7 * np.abs(live).mean()
    assert np.abs(taken).max() < 0.5 * np.abs(live).max()
    assert kl_taken < 0.3 * kl_live
