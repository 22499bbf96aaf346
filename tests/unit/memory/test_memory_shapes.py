"""Shapes against transformers' own models, which the meta device builds without weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from plimsoll.model.tiny import tiny_config
from plimsoll.shapes.families import FAMILIES, shape_from_config
from plimsoll.shapes.known_models import known_models, read_shape
from plimsoll.shapes.shape import Linear, ModelShape, small_parameters

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
}
TYPES = ["full_attention"] * 2 + ["sliding_attention"] * 4
WINDOW = {"use_sliding_window": True, "sliding_window": 16}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"num_key_value_heads": None, "sliding_window": 16}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None, "head_dim": 16, "tie_word_embeddings": True}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16}),
    ("qwen2", {**WINDOW, "max_window_layers": 4}),
    ("qwen2", {**WINDOW, "layer_types": TYPES}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, **WINDOW, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen2_moe", {**EXPERTS, **SHARED, **WINDOW, "max_window_layers": 3}),
    ("qwen2_moe", {**EXPERTS, **SHARED, "qkv_bias": False, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [0, 3]}),
    ("qwen3_moe", {**EXPERTS, **WINDOW, "attention_bias": True, "tie_word_embeddings": True}),
    ("gemma", {"head_dim": 16}),
    ("gemma", {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
    ("gemma2", {"head_dim": 16, "sliding_window": 16}),
    ("gemma2", {"head_dim": 16, "sliding_window": 16, "layer_types": TYPES}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 16}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2}),
    ("glm4_moe", {**GLM, "head_dim": 16, "attention_bias": True}),
    ("glm4_moe", {**GLM, "use_qk_norm": True}),
    ("deepseek_v2", {**GLM, **LATENT, "q_lora_rank": None}),
    ("deepseek_v2", {**GLM, **LATENT, "attention_bias": True}),
    ("deepseek_v3", {**GLM, **LATENT}),
    ("deepseek_v3", {**GLM, **LATENT, "q_lora_rank": None, "attention_bias": True}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    (
        "gpt_oss",
        {
            "head_dim": 16,
            "attention_bias": False,
            "layer_types": TYPES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
    ),
    ("phi", {}),
    ("phi", {"qk_layernorm": True, "tie_word_embeddings": True}),
    ("phi3", {"sliding_window": 16}),
    ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": None}),
]


def _build(auto: Any, config: dict[str, Any], **more: object) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(AutoConfig.for_model(**config, **more))
        model.tie_weights()
    return model


def _linear_groups(model: nn.Module) -> Counter[tuple[str, int, int, bool]]:
    groups: Counter[tuple[str, int, int, bool]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            bias = module.bias is not None
            last = name.rpartition(".")[2]
            groups[last, module.in_features, module.out_features, bias] += 1
    return groups


def _shape_groups(shape: ModelShape) -> Counter[tuple[str, int, int, bool]]:
    groups: Counter[tuple[str, int, int, bool]] = Counter()
    for linear in shape.linears:
        if linear.stacked == 1:
            groups[linear.name, linear.inputs, linear.outputs, linear.bias] += linear.count
    return groups


def _check_against_transformers(config: dict[str, Any], shape: ModelShape) -> None:
    model = _build(AutoModelForCausalLM, config)
    sizes = [parameter.numel() for parameter in model.parameters()]
    stacks = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    assert shape.parameters == sum(sizes)
    linears = sum(linear.parameters for linear in shape.linears)
    assert linears + shape.other_parameters == sum(sizes) - (
        shape.embedding_parameters + shape.head_parameters
    )
    assert _shape_groups(shape) == _linear_groups(model)
    experts = (x for x in shape.linears if x.stacked > 1)
    assert sum(x.count * x.inputs * x.outputs for x in experts) == stacks
    assert shape.largest_parameter == max(sizes)
    for threshold in sorted({0, *sizes, 100_000}):
        assert small_parameters(shape, threshold) == sum(n for n in sizes if n <= threshold)
    if config["model_type"] != "glm4_moe":  # transformers has no such value model
        value = _build(AutoModelForSequenceClassification, config, num_labels=1)
        sizes = [parameter.numel() for parameter in value.parameters()]
        assert shape.value_parameters == sum(sizes)
        for threshold in sorted({0, *sizes, 100_000}):
            small = small_parameters(shape, threshold, value=True)
            assert small == sum(n for n in sizes if n <= threshold)


@pytest.mark.parametrize(("family", "settings"), VARIANTS)
def test_tiny_models_have_the_shape_that_transformers_builds(
    family: str, settings: dict[str, Any]
) -> None:
    config = {"model_type": family, **TINY, **settings}
    shape = shape_from_config(config, "tiny")
    _check_against_transformers(config, shape)
    built = AutoConfig.for_model(**config)
    saved = shape_from_config(built.to_dict(), "tiny")  # which may name its fields otherwise
    assert replace(saved, name="tiny") == shape
    assert (shape.vocabulary, shape.positions) == (96, 64)
    assert shape.sliding_layers == _sliding_layers(built)
    assert shape.sliding_window == (16 if shape.sliding_layers else None)
    assert shape.gated == (family != "phi")


def _sliding_layers(config: Any) -> int:
    if config.model_type in ("llama", "gemma", "phi", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        return 0  # their attention knows no window
    types = getattr(config, "layer_types", None)
    if types is not None:
        return int(types.count("sliding_attention"))
    return int(config.num_hidden_layers) if config.sliding_window else 0


def test_every_family_is_compared_but_the_one_that_transformers_lacks() -> None:
    assert {family for family, _ in VARIANTS} == set(FAMILIES) - {"qwen"}


def _one_of_each_shape() -> list[str]:
    seen: dict[str, str] = {}
    for name, config in known_models().items():
        bare = {k: v for k, v in config.items() if k != "max_position_embeddings"}
        if config["model_type"] != "qwen":
            seen.setdefault(repr(bare), name)
    return list(seen.values())


@pytest.mark.parametrize("name", _one_of_each_shape())
def test_known_models_have_the_shape_that_transformers_builds(name: str) -> None:
    config = dict(known_models()[name])
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    _check_against_transformers({**config, **special}, read_shape(name))


PUBLISHED = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-70b": 68_976_648_192,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "CodeLlama-7b": 6_738_546_688,
    "CodeLlama-13b": 13_016_028_160,
    "CodeLlama-34b": 33_743_970_304,
    "Yi-6B": 6_061_035_520,
    "Yi-9B": 8_829_407_232,
    "Yi-34B": 34_388_917_248,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen-1.8B": 1_836_828_672,
    "Qwen-7B": 7_721_324_544,
    "Qwen-14B": 14_167_290_880,
    "Qwen-72B": 72_287_920_128,
    "Qwen1.5-0.5B": 463_987_712,
    "Qwen1.5-1.8B": 1_836_828_672,
    "Qwen1.5-4B": 3_950_369_280,
    "Qwen1.5-7B": 7_721_324_544,
    "Qwen1.5-14B": 14_167_290_880,
    "Qwen1.5-32B": 32_512_218_112,
    "Qwen1.5-72B": 72_287_920_128,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200 - 58 * 256,  # routers' biases, which are buffers
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b-it": 999_885_952,
    "phi-1": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-3-medium-4k-instruct": 13_960_238_080,
    "phi-4": 14_659_507_200,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_as_published(name: str, parameters: int) -> None:
    assert read_shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("size", "published"),
    [("4b", 4_300_079_472), ("12b", 12_187_325_040), ("27b", 27_432_406_640)],
)
def test_the_text_part_of_gemma_3_is_the_published_whole_without_its_eyes(
    size: str, published: int
) -> None:
    """The same vision tower in all three, a projection from its 1,152 numbers, and a norm."""
    shape = read_shape(f"google/gemma-3-{size}-pt")
    assert published - shape.parameters == 416_866_032 + 1152 * shape.hidden + 1152


def test_adapters_can_wrap_linears_but_not_stacked_experts() -> None:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert read_shape("Qwen2.5-7B").adapter_targets == (*attention, *mlp)
    assert read_shape("Mixtral-8x7B-v0.1").adapter_targets == attention


def test_4_bit_codes_count_as_the_elements_that_they_are_stored_as() -> None:
    """Two bfloat16 layers of 64 x 64 and 64 x 96, with a bias each: four codes make an element."""
    linears = (Linear("a", 64, 64, True, 2), Linear("b", 64, 96, True, 2))
    whole = shape_from_config(tiny_config("qwen2", True, vocab=1000).to_dict(), "tiny")
    shape = replace(whole, linears=linears, other_tensors=())
    biases = 2 * 64 + 2 * 96
    assert small_parameters(shape, 100) == small_parameters(shape, 100, codes=4) == biases
    assert small_parameters(shape, 1024, codes=4) == biases + 2 * 64 * 64 // 4
    assert small_parameters(shape, 64 * 96, codes=4) == biases + 2 * 64 * (64 + 96) // 4


def test_latent_attention_caches_one_narrow_vector_a_token_and_layer() -> None:
    """DeepSeek-V3 keeps 512 + 64 numbers in each of 61 layers, on every card of an engine."""
    shape = read_shape("deepseek-ai/DeepSeek-R1")
    assert shape.cached_numbers() == shape.cached_numbers(8) == 61 * (512 + 64)
    grouped = read_shape("Qwen2.5-7B")  # 4 key-value heads of 128 in 28 layers
    assert [grouped.cached_numbers(cards) for cards in (1, 2, 8)] == [
        2 * 28 * heads * 128 for heads in (4, 2, 1)
    ]
