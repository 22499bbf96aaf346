"""Special parts of families against transformers: experts, windows, scaled positions; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_cases import CPU, LENGTHS, VOCAB, alone, assert_same, samples_of, settings_for, together
from packed_cases import write as write_sharp
from transformers import (
    BertConfig,
    DeepseekV3Config,
    DogeConfig,
    ElectraConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from plimsoll.errors import ConfigError
from plimsoll.model.load import load_policy

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8),
    # Its layers are told of the window by their mask alone; the first is full, the second slides.
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **GROUPED,
        **EXPERTS,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SHAPE, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    ),
    "granite_swa": lambda: GraniteSWAConfig(**GROUPED, sliding_window=4),  # has attention sinks
    "longrope": lambda: Phi3Config(
        **GROUPED, rope_parameters=LONGROPE, original_max_position_embeddings=12
    ),
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_transformers(family: str, tmp_path: Path) -> None:
    path = write_sharp(tmp_path / "m", FAMILIES[family]())
    samples = samples_of(LENGTHS)
    assert_same(together(path, samples), alone(path, samples))


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions_equal_transformers(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    path = write_sharp(tmp_path / "m", LlamaConfig(**GROUPED, rope_parameters=rope))
    samples = samples_of((7, 1, 40, 7))
    assert_same(together(path, samples), alone(path, samples))


def test_the_window_of_a_mask_reaches_attention(tmp_path: Path) -> None:
    config = FAMILIES["qwen2_moe"]()
    path = write_sharp(tmp_path / "narrow", config)
    narrow = together(path, samples_of((12,))).logprobs
    config.sliding_window = 12
    wide = together(write_sharp(tmp_path / "wide", config), samples_of((12,))).logprobs
    assert (narrow - wide).abs().max() > 1e-2


@pytest.mark.parametrize(("kind", "limit"), [("longrope", 12), ("dynamic", 64)])
def test_sequences_whose_angles_would_be_their_neighbours_are_refused(
    kind: str, limit: int, tmp_path: Path
) -> None:
    """transformers would turn the short sequence by the long one's angles too."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, **ROPES["dynamic"]}
    config = (
        FAMILIES[kind]() if kind == "longrope" else LlamaConfig(**GROUPED, rope_parameters=dynamic)
    )
    path = write_sharp(tmp_path / "m", config)
    assert_same(together(path, samples_of((7, limit))), alone(path, samples_of((7, limit))))
    with pytest.raises(ConfigError, match=rf"{limit + 1} tokens long.*at most {limit}"):
        together(path, samples_of((7, limit + 1)))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "auxiliary loss": (
        lambda: MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True),
        "auxiliary loss",
    ),
    "noise": (
        lambda: MixtralConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.1),
        "router_jitter_noise",
    ),
    "drawn experts": (
        lambda: PhimoeConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.0),
        "draws the experts",
    ),
    "own masks": (lambda: DogeConfig(**GROUPED), "masks of their own"),
    "own masks, windows": (
        lambda: DogeConfig(**GROUPED, sliding_window=4),
        "masks of their own",
    ),
    "both ways": (lambda: LlamaConfig(**GROUPED, is_causal=False), "not causal"),
    "bert": (lambda: BertConfig(**SHAPE, **NO_DROPOUT, is_decoder=True), "between"),
    "electra": (
        lambda: ElectraConfig(**SHAPE, **NO_DROPOUT, embedding_size=32, is_decoder=True),
        "between",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_family_that_would_be_computed_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    config, why = REFUSED[case]
    config().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"never opened")
    with pytest.raises(ConfigError, match=why):
        load_policy(settings_for(tmp_path / "m"), CPU)


def test_a_family_that_does_not_pass_the_layout_on_is_refused(tmp_path: Path) -> None:
    path = write_sharp(tmp_path / "m", NemotronConfig(**GROUPED))
    with pytest.raises(ConfigError, match="NemotronAttention does not get"):
        together(path, samples_of(LENGTHS))
