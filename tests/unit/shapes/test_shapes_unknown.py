"""Shapes of families that no entry of families.json describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.errors import ConfigError
from plimsoll.shapes.families import FAMILIES, shape_from_config
from plimsoll.shapes.unknown import _count_shape, estimate_shape

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.fixture(autouse=True)
def _nothing_counted_before() -> None:
    _count_shape.cache_clear()


@pytest.mark.parametrize("family", ["granite", "olmo2", "cohere", "starcoder2", "granitemoe"])
def test_the_parameters_are_those_that_transformers_builds(family: str) -> None:
    config = {"model_type": family, **SIZES}
    shape = estimate_shape(config, "new")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.origin == "counted" and shape.family == family
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("gemma2", {"head_dim": 16, "sliding_window": 32}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 32}),
        ("phi", {}),
        ("qwen3_moe", {"head_dim": 32, **MIXTURE}),
        ("qwen2_moe", {**MIXTURE, "shared_expert_intermediate_size": 80}),
    ],
)
def test_a_known_family_is_counted_as_it_is_described(
    family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": family, **SIZES, **more}
    described = shape_from_config(config, "new")
    monkeypatch.delitem(FAMILIES, family)
    counted = estimate_shape(config, "new")
    assert counted.parameters == described.parameters
    assert counted.largest_parameter == described.largest_parameter
    assert {*counted.adapter_targets} == {*described.adapter_targets}
    alike = (
        *("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "tied", "gated"),
        *("experts", "experts_per_token", "expert_intermediate", "shared_intermediate"),
        *("sliding_window", "sliding_layers", "softcapped", "logits_softcapped", "head_bias"),
    )
    for name in alike:
        assert getattr(counted, name) == getattr(described, name), name
    for name in ("norms", "query_norms", "post_norms", "parallel"):
        assert getattr(counted.traits, name) == getattr(described.traits, name), name


def test_a_family_that_transformers_lacks_counts_as_a_llama() -> None:
    guess = estimate_shape({"model_type": "nobody", **SIZES}, "new")
    assert (guess.origin, guess.family) == ("guessed", "nobody")
    assert guess.parameters == shape_from_config({"model_type": "llama", **SIZES}, "new").parameters


@pytest.mark.parametrize("config", [SIZES | MIXTURE, {"hidden_size": 64}])
def test_experts_or_missing_sizes_are_not_guessed(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'nobody', a family that Plimsoll does not know"):
        estimate_shape({"model_type": "nobody", **config}, "new")
