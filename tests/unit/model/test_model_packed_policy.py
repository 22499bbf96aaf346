"""A pack through PolicyModel against every sequence alone through plain transformers, eager."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import (
    CPU,
    LENGTHS,
    SMALL,
    VOCAB,
    alone,
    assert_same,
    packed,
    samples_of,
    settings_for,
    together,
    write,
)
from torch import Tensor
from transformers import (
    Cohere2Config,
    CohereConfig,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
)

from plimsoll.data.packing import pack_one
from plimsoll.model.files import hf_state_names
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import Family, tiny_config
from plimsoll.records import Sample


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", get_args(Family))
def test_pack_equals_each_sequence_alone(family: Family, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config(family, tied, **SMALL))
    samples = samples_of(LENGTHS)
    assert_same(together(path, samples), alone(path, samples))


def test_every_sequence_starts_at_position_zero(tmp_path: Path) -> None:
    """GPT-2 learns a vector per position; rotary embeddings see only distances."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = write(tmp_path / "model", config)
    samples = samples_of(LENGTHS)
    assert_same(together(path, samples), alone(path, samples))


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3"])
def test_sliding_windows_shorter_than_the_sequences(
    family: Family, window: int, tmp_path: Path
) -> None:
    samples = samples_of(LENGTHS)
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL, window=window))
    assert_same(together(path, samples), alone(path, samples))


def test_the_window_changes_the_result(tmp_path: Path) -> None:
    samples = samples_of(LENGTHS)
    wide = together(write(tmp_path / "w", tiny_config("mistral", True, **SMALL)), samples)
    narrow = write(tmp_path / "n", tiny_config("mistral", True, **SMALL, window=4))
    assert (together(narrow, samples).logprobs - wide.logprobs).abs().max() > 1e-2


def test_strong_softcaps_of_scores_and_logits(tmp_path: Path) -> None:
    samples = samples_of(LENGTHS)
    config = tiny_config("gemma2", True, **SMALL, window=4)
    config.attn_logit_softcapping, config.final_logit_softcapping = 1.5, 2.0
    path = write(tmp_path / "model", config)
    assert_same(together(path, samples, temperature=0.7), alone(path, samples, temperature=0.7))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_gradient_checkpointing_changes_nothing(family: Family, tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL, window=4))
    samples = samples_of(LENGTHS)
    assert_same(together(path, samples, gradient_checkpointing=True), alone(path, samples))


def test_gradient_checkpointing_is_on(tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config("qwen2", True, **SMALL))
    kept: dict[bool, int] = {}
    for on in (False, True):
        model = load_policy(settings_for(path, gradient_checkpointing=on), CPU)
        saved: list[int] = []

        def count(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(packed(samples_of(LENGTHS)))
        kept[on] = sum(saved)
    assert kept[True] < kept[False] / 2


SCALED = {
    "cohere": lambda **common: CohereConfig(logit_scale=0.3, **common),
    "cohere2": lambda **common: Cohere2Config(logit_scale=0.3, sliding_window=4, **common),
    "granite": lambda **common: GraniteConfig(
        logits_scaling=3.0, embedding_multiplier=2.0, attention_multiplier=0.4, **common
    ),
    "hyperclovax": lambda **common: HyperCLOVAXConfig(logits_scaling=0.4, **common),
}


@pytest.mark.parametrize("family", SCALED)
def test_families_that_scale_their_logits(family: str, tmp_path: Path) -> None:
    config = SCALED[family](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = write(tmp_path / "model", config)
    samples = samples_of(LENGTHS)
    assert_same(together(path, samples, temperature=1.3), alone(path, samples, temperature=1.3))


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    path = write(tmp_path_factory.mktemp("shared") / "m", tiny_config("qwen3", True, **SMALL))
    return load_policy(settings_for(path), CPU)


@settings(max_examples=percent(25))
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_neighbours_in_the_pack_change_nothing(
    shared_model: PolicyModel, lengths: list[int], seed: int
) -> None:
    samples = samples_of(lengths, seed)
    with torch.no_grad():
        pack = packed(samples)
        found = shared_model(pack).logprobs_L
        single = [shared_model(packed([s])).logprobs_L for s in samples]
    assert found.shape == pack.targets_L.shape
    torch.testing.assert_close(found, torch.cat(single), rtol=1e-5, atol=1e-5)


def test_a_filler_gives_zero_gradients_to_every_parameter(shared_model: PolicyModel) -> None:
    filler = Sample(np.array([1, 2]), np.array([False, False]))
    shared_model.zero_grad()
    shared_model(packed([filler])).logprobs_L.sum().backward()
    gradients = [parameter.grad for parameter in shared_model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_only_learned_positions_reach_the_head(shared_model: PolicyModel) -> None:
    seen: list[int] = []
    head = shared_model.lm.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    sample = Sample(np.arange(9), np.arange(9) >= 7)
    shared_model(packed([sample]))
    hook.remove()
    assert seen == [2]


def test_bfloat16_weights_keep_rotary_frequencies_in_fp32(tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config("llama", False, **SMALL))
    model = load_policy(settings_for(path, dtype="bfloat16"), CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frequencies = [b for name, b in model.named_buffers() if "inv_freq" in name]
    exact = 10000 ** (-torch.arange(0, 8, 2) / 8)
    assert frequencies and all(b.dtype == torch.float32 for b in frequencies)
    torch.testing.assert_close(frequencies[0], exact)
    assert model(packed(samples_of(LENGTHS)), entropy="metric").logprobs_L.dtype == torch.float32


def test_loading_twice_gives_the_same_bits(tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config("qwen2", True, **SMALL))
    first, second = (load_policy(settings_for(path), CPU) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_names_of_tied_and_untied_heads(tmp_path: Path) -> None:
    tied = load_policy(settings_for(write(tmp_path / "t", tiny_config("qwen2", True))), CPU)
    untied = load_policy(settings_for(write(tmp_path / "u", tiny_config("qwen2", False))), CPU)
    assert tied.tied_names == {"lm_head.weight": "model.embed_tokens.weight"}
    assert untied.tied_names == {}
    extra = set(hf_state_names(untied).values()) - set(hf_state_names(tied).values())
    assert extra == {"lm_head.weight"}
    assert hf_state_names(tied)["lm.model.norm.weight"] == "model.norm.weight"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_agrees_with_sdpa_on_cuda(window: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config("mistral", True, **SMALL, window=window))
    device = torch.device("cuda")
    pack = PackTensors.from_pack(pack_one(samples_of(LENGTHS), range(len(LENGTHS))), device)
    results = {}
    for attention in ("sdpa", "varlen"):
        config = settings_for(path, dtype="bfloat16", attention=attention)
        model = load_policy(config, device).to(device)
        results[attention] = model(pack).logprobs_L
        results[attention].sum().backward()
    torch.testing.assert_close(results["varlen"], results["sdpa"], rtol=0.05, atol=0.1)
