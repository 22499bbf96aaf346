"""The formulas of activations against the true architectures, traced with fake tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from choice import slow
from decided import decided_model
from traced_roles import TraceForm, trace_form

from plimsoll.config.cluster import DecidedExchange
from plimsoll.config.engine import AdapterConfig
from plimsoll.resolve.roles import HeadKind
from plimsoll.shapes.known_models import find_shape, read_fields
from plimsoll.shapes.shape import MicroBatch

WITHIN = 0.05
WORK = MicroBatch(tokens=1024, sequences=2, longest=512, loss_tokens=32)
MODELS = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
    "mistralai/Mistral-7B-v0.1",
    "google/gemma-2b",
    "google/gemma-2-2b",
    "google/gemma-3-1b-pt",
    "microsoft/phi-2",
    "microsoft/Phi-3-mini-4k-instruct",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2-57B-A14B",
    "zai-org/GLM-4.5-Air",
)
SINKS = "openai/gpt-oss-20b"
LATENT = ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite")


def _form(path: str, head: HeadKind = "policy", trained: bool = True, **model: Any) -> TraceForm:
    settings = decided_model(path=path, **{"dtype": "bfloat16", "head_chunk": 24, **model})
    return TraceForm(settings, None, head, trained)


def _with_dora(path: str, dropout: float, **model: Any) -> TraceForm:
    adapter = AdapterConfig(dora=True, dropout=dropout)
    settings = decided_model(path=path, **{"dtype": "bfloat16", "head_chunk": 24, **model})
    return TraceForm(settings, adapter, "policy", trained=True)


def _with_adapter(path: str, **model: Any) -> TraceForm:
    adapter = AdapterConfig(targets=("q_proj", "v_proj", "down_proj"), dropout=0.1)
    settings = decided_model(path=path, **{"dtype": "bfloat16", "head_chunk": 24, **model})
    return TraceForm(settings, adapter, "policy", trained=True)


@pytest.mark.parametrize(
    ("path", "checkpointed"),
    [
        *zip(MODELS[::2], cycle((False, True)), strict=False),
        *(slow(*case) for case in zip(MODELS[1::2], cycle((False, True)), strict=False)),
        *(slow(*case) for case in zip(MODELS[::2], cycle((True, False)), strict=False)),
        *(slow(*case) for case in zip(MODELS[1::2], cycle((True, False)), strict=False)),
    ],
)
def test_training_a_policy(path: str, checkpointed: bool) -> None:
    found = trace_form(_form(path, gradient_checkpointing=checkpointed), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed", "freezes", "routed"),
    [
        ("Qwen/Qwen3-30B-A3B", False, True, True),
        slow("mistralai/Mixtral-8x7B-v0.1", True, True, False),
        slow("Qwen/Qwen2-57B-A14B", False, True, False),
        slow("Qwen/Qwen3-30B-A3B", "selective", False, True),
    ],
)
def test_routers_that_are_frozen_or_take_a_samplers_experts(
    path: str, checkpointed: bool | str, freezes: bool, routed: bool
) -> None:
    form = replace(_form(path, gradient_checkpointing=checkpointed), freezes=freezes, routed=routed)
    found = trace_form(form, WORK)
    assert abs(found.error) < WITHIN, found
    plain = trace_form(replace(form, freezes=False), WORK)
    if freezes:  # and with them the gradients
        assert found.traced.gradients < plain.traced.gradients
    assert found.predicted_activations <= plain.predicted_activations


@pytest.mark.parametrize(
    ("path", "checkpointed"),
    [
        (LATENT[0], True),
        (LATENT[1], "selective"),  # which makes the products of the narrow vectors anew
        slow(LATENT[0], "selective"),
        slow(LATENT[1], False),
    ],
)
def test_latent_attention(path: str, checkpointed: bool | str) -> None:
    found = trace_form(_form(path, gradient_checkpointing=checkpointed), WORK)
    assert abs(found.error) < WITHIN, found
    scored = trace_form(_form(path, trained=False), WORK)
    assert abs(scored.error) < WITHIN, scored


@pytest.mark.parametrize(
    ("checkpointed", "tokens", "longest"),
    [(True, 2048, 128), (False, 2048, 128), (False, 1024, 512), slow("selective", 4096, 2048)],
)
def test_sinks_and_clamped_experts(checkpointed: bool | str, tokens: int, longest: int) -> None:
    """Half of the layers see 128 tokens."""
    work = MicroBatch(tokens, tokens // longest, longest, loss_tokens=32)
    found = trace_form(_form(SINKS, gradient_checkpointing=checkpointed), work)
    assert abs(found.error) < WITHIN, found


def test_scoring_and_adapters_with_sinks() -> None:
    work = replace(WORK, longest=128, sequences=8)
    scored = trace_form(_form(SINKS, trained=False), work)
    assert abs(scored.error) < WITHIN, scored
    model = decided_model(path=SINKS, dtype="bfloat16", gradient_checkpointing=False)
    adapter = AdapterConfig(targets=("q_proj", "v_proj"), dropout=0.1)
    found = trace_form(TraceForm(model, adapter, "policy", trained=True), work)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("family", "checkpointed"), [("granite", True), slow("olmo2", False), slow("granitemoe", False)]
)
def test_a_family_that_is_counted(family: str, checkpointed: bool, tmp_path: Path) -> None:
    """No entry describes it: the norms of the model that transformers builds are traced."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    found = trace_form(_form(str(tmp_path), gradient_checkpointing=checkpointed), WORK)
    assert found.traced.weights == 2 * find_shape(str(tmp_path)).parameters
    assert abs(found.error) < 0.10, found


def test_norms_of_queries_and_keys_where_a_config_asks_for_them(tmp_path: Path) -> None:
    """GLM-4.5 has these norms, and its smaller model has none."""
    _, air = read_fields("zai-org/GLM-4.5-Air")
    (tmp_path / "config.json").write_text(json.dumps({**air, "use_qk_norm": True}))
    found = trace_form(_form(str(tmp_path)), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize("path", [MODELS[0], MODELS[-3], *map(slow, MODELS[3:-3:3])])
def test_selective_checkpointing(path: str) -> None:
    found = trace_form(_form(path, gradient_checkpointing="selective"), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "kind", "every"),
    [
        slow("meta-llama/Llama-2-7b-hf", True, 2),  # 32 layers: the last one is whole
        ("Qwen/Qwen2.5-7B", "selective", 3),  # 28 layers: the last one is checkpointed
    ],
)
def test_a_checkpoint_every_few_layers(path: str, kind: bool | str, every: int) -> None:
    found = trace_form(_form(path, gradient_checkpointing=kind, checkpoint_every=every), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("meta-llama/Meta-Llama-3-8B", "selective"),
        ("google/gemma-2-2b", True),  # a norm after the MLP
        ("microsoft/Phi-3-mini-4k-instruct", False),
        slow("Qwen/Qwen2-57B-A14B", True),  # the shared expert
        slow("microsoft/phi-2", "selective"),
    ],
)
def test_mlps_in_tiles(path: str, kind: bool | str) -> None:
    work = replace(WORK, tokens=4096, sequences=8)
    found = trace_form(_form(path, gradient_checkpointing=kind, mlp_tile=512), work)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize("path", ["meta-llama/Meta-Llama-3-8B", slow("google/gemma-2-2b")])
def test_mlps_in_tiles_with_an_adapter_and_without_gradients(path: str) -> None:
    work = replace(WORK, tokens=4096, sequences=8)
    adapted = trace_form(_with_adapter(path, gradient_checkpointing=True, mlp_tile=512), work)
    assert abs(adapted.error) < WITHIN, adapted
    scored = trace_form(_form(path, trained=False, mlp_tile=512), work)
    assert abs(scored.error) < WITHIN, scored


@pytest.mark.parametrize("path", [MODELS[0], MODELS[-3], *map(slow, MODELS[3:-3:3])])
def test_scoring_with_a_policy(path: str) -> None:
    found = trace_form(_form(path, trained=False), WORK)
    assert found.traced.gradients == 0
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed"),
    [
        ("Qwen/Qwen2.5-7B", True),
        slow("google/gemma-3-1b-pt", False),
        ("mistralai/Mixtral-8x7B-v0.1", True),
    ],
)
def test_training_a_value_function(path: str, checkpointed: bool) -> None:
    found = trace_form(_form(path, "value", gradient_checkpointing=checkpointed), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed"),
    [
        ("meta-llama/Llama-2-7b-hf", "selective"),
        ("Qwen/Qwen3-8B", False),
        slow("google/gemma-2-2b", True),
        slow("meta-llama/Llama-2-7b-hf", False),
        slow("meta-llama/Llama-2-7b-hf", True),
        slow("Qwen/Qwen3-8B", True),
        slow("google/gemma-2-2b", False),
    ],
)
def test_training_an_adapter(path: str, checkpointed: bool | str) -> None:
    found = trace_form(_with_adapter(path, gradient_checkpointing=checkpointed), WORK)
    assert found.traced.gradients < found.traced.weights / 50
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed", "targets"),
    [
        ("Qwen/Qwen3-30B-A3B", True, ("all-linear", "experts")),
        ("mistralai/Mixtral-8x7B-v0.1", False, ("experts",)),
        slow("mistralai/Mixtral-8x7B-v0.1", "selective", ("experts",)),
        slow("Qwen/Qwen3-30B-A3B", False, ("q_proj", "experts")),
        slow("Qwen/Qwen2-57B-A14B", True, ("all-linear", "experts")),
        slow("zai-org/GLM-4.5-Air", True, ("o_proj", "experts")),  # their results become fp32
    ],
)
def test_training_an_adapter_of_experts(
    path: str, checkpointed: bool | str, targets: tuple[str, ...]
) -> None:
    form = _form(path, gradient_checkpointing=checkpointed)
    found = trace_form(replace(form, adapter=AdapterConfig(targets=targets)), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize("path", ["Qwen/Qwen3-30B-A3B", slow("zai-org/GLM-4.5-Air")])
def test_scoring_with_an_adapter_of_experts(path: str) -> None:
    adapter = AdapterConfig(targets=("o_proj", "experts"))
    found = trace_form(replace(_form(path, trained=False), adapter=adapter), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed", "whole"),
    [
        ("meta-llama/Llama-2-7b-hf", True, ("embed_tokens", "lm_head")),
        ("Qwen/Qwen2.5-0.5B", "selective", ("embed_tokens",)),
        slow("meta-llama/Llama-2-7b-hf", False, ("lm_head",)),
    ],
)
def test_training_modules_whole_beside_an_adapter(
    path: str, checkpointed: bool | str, whole: tuple[str, ...]
) -> None:
    form = _with_adapter(path, gradient_checkpointing=checkpointed)
    assert form.adapter is not None
    adapter = form.adapter.model_copy(update={"modules_to_save": whole})
    found = trace_form(replace(form, adapter=adapter), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed", "dropout"),
    [
        slow("meta-llama/Llama-2-7b-hf", False, 0.0),
        slow("meta-llama/Llama-2-7b-hf", True, 0.1),
        ("Qwen/Qwen2.5-0.5B", "selective", 0.1),
        slow("google/gemma-2-2b", True, 0.0),
        slow("microsoft/phi-2", True, 0.1),
    ],
)
def test_training_an_adapter_with_magnitudes(
    path: str, checkpointed: bool | str, dropout: float
) -> None:
    found = trace_form(_with_dora(path, dropout, gradient_checkpointing=checkpointed), WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "dora"),
    [
        ("meta-llama/Llama-2-7b-hf", False),
        ("microsoft/Phi-3-mini-4k-instruct", True),
        slow("meta-llama/Llama-2-7b-hf", True),
        slow("microsoft/Phi-3-mini-4k-instruct", False),
    ],
)
def test_scoring_with_an_adapter(path: str, dora: bool) -> None:
    adapter = AdapterConfig(dora=dora)
    found = trace_form(
        TraceForm(
            decided_model(path=path, head_chunk=24, dtype="bfloat16"),
            adapter,
            "policy",
            trained=False,
        ),
        WORK,
    )
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    "path", [slow("meta-llama/Llama-2-7b-hf"), "microsoft/Phi-3-mini-4k-instruct"]
)
def test_training_in_fp32(path: str) -> None:
    found = trace_form(_form(path, dtype="float32"), WORK)
    half = trace_form(_form(path), WORK)
    assert found.traced.weights == 2 * half.traced.weights
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed"),
    [
        ("google/gemma-2-2b", True),
        slow("google/gemma-3-1b-pt", False),
        slow("microsoft/Phi-3-mini-4k-instruct", False),
    ],
)
def test_one_sequence_longer_than_the_window(path: str, checkpointed: bool) -> None:
    work = MicroBatch(tokens=4608, sequences=1, longest=4608, loss_tokens=16)
    found = trace_form(_form(path, gradient_checkpointing=checkpointed), work)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "exchange", "checkpointed", "shared"),
    [
        ("Qwen/Qwen3-8B", "heads", False, 0),
        ("microsoft/Phi-3-mini-4k-instruct", "keys", True, 2000),
        slow("meta-llama/Meta-Llama-3-8B", "keys", False, 2000),
        slow("mistralai/Mistral-7B-v0.1", "heads", "selective", 2000),
        slow("google/gemma-2-2b", "heads", True, 0),
        slow("openai/gpt-oss-20b", "keys", True, 0),
        slow("Qwen/Qwen3-30B-A3B", "heads", "selective", 0),
    ],
)
def test_ranks_that_share_a_pack(
    path: str, exchange: DecidedExchange, checkpointed: bool | str, shared: int
) -> None:
    longest = 512 if shared else 2048
    work = MicroBatch(1024, 2048 // longest, longest, 32, shared, shards=2, exchange=exchange)
    found = trace_form(_form(path, gradient_checkpointing=checkpointed), work)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize(
    ("path", "checkpointed"), [("Qwen/Qwen2.5-0.5B", False), ("google/gemma-2-2b", True)]
)
def test_sequences_that_share_almost_all(path: str, checkpointed: bool) -> None:
    work = MicroBatch(tokens=1026, sequences=2, longest=512, loss_tokens=32, shared=1022)
    found = trace_form(_form(path, gradient_checkpointing=checkpointed), work)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize("path", [slow("meta-llama/Llama-2-7b-hf"), "google/gemma-2-2b"])
def test_entropy_and_temperature_at_the_head(path: str) -> None:
    model = decided_model(path=path, head_chunk=24, gradient_checkpointing=True, dtype="bfloat16")
    form = TraceForm(model, None, "policy", trained=True, entropy=True, temperature=0.7)
    found = trace_form(form, WORK)
    assert abs(found.error) < WITHIN, found


@pytest.mark.parametrize("path", [slow("meta-llama/Llama-2-7b-hf"), "google/gemma-2-2b"])
def test_imitating_tokens_whose_gradients_are_made_with_their_logits(path: str) -> None:
    model = decided_model(path=path, head_chunk=24, gradient_checkpointing=True, dtype="bfloat16")
    found = trace_form(TraceForm(model, None, "policy", trained=True, imitates=True), WORK)
    assert abs(found.error) < WITHIN, found


def test_weights_and_gradients_are_those_of_the_whole_model() -> None:
    found = trace_form(_form("meta-llama/Llama-2-7b-hf"), WORK)
    assert found.traced.weights == found.traced.gradients == 2 * 6_738_415_616
