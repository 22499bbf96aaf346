"""NEFTune's noise: its size by the paper's formula, its seeds, and where it enters the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decided import decided_model
from torch import Tensor

from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack_one
from plimsoll.model.adapters import add_adapter
from plimsoll.model.load import load_policy
from plimsoll.model.policy import EmbeddingNoise, PackTensors, PolicyModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
WIDTH = 32
ALPHA = 5.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise")
    config = tiny_config("qwen2", True, vocab=60, hidden=WIDTH, feed_forward=48)
    write_tiny_model(path, config, seed=3, tokenizer=None)
    return path


def load(path: Path, *, checkpointing: bool = False, dtype: str = "float32") -> PolicyModel:
    return load_policy(
        decided_model(str(path), dtype=dtype, gradient_checkpointing=checkpointing), CPU
    )


def sample(length: int, seed: int) -> Sample:
    tokens = np.random.default_rng(seed).integers(0, 60, length)
    return Sample(tokens, np.arange(length) > 0)


SAMPLES = [sample(9, 1), sample(4, 2), sample(23, 3)]


def packed(*chosen: int) -> tuple[PackTensors, EmbeddingNoise]:
    """A pack of some of the samples; sample i has the seed 100 + i."""
    pack = PackTensors.from_pack(pack_one(SAMPLES, chosen), CPU)
    lengths = tuple(len(SAMPLES[i].tokens) for i in chosen)
    return pack, EmbeddingNoise(ALPHA, lengths, tuple(100 + i for i in chosen))


def test_noise_is_uniform_within_the_papers_bound() -> None:
    """The bound is alpha / sqrt(length * width) with the sequence's own length; the mean is 0.

    The variance is that of the uniform distribution, bound^2 / 3.
    """
    lengths = (1000, 10)
    noise_TH = EmbeddingNoise(ALPHA, lengths, (1, 2)).draw(64, CPU)
    assert noise_TH.shape == (1010, 64) and noise_TH.dtype == torch.float32
    for own, length in zip(noise_TH.split(lengths), lengths, strict=True):
        bound = ALPHA / (length * 64) ** 0.5
        assert 0.99 * bound < float(own.abs().max()) <= bound
        count = length * 64
        assert abs(float(own.mean())) < 4 * bound / (3 * count) ** 0.5
        assert float(own.var()) == pytest.approx(bound**2 / 3, rel=0.1)


def test_noise_is_decided_by_the_seed_and_leaves_torchs_own_numbers_alone() -> None:
    state = torch.get_rng_state()
    first = EmbeddingNoise(ALPHA, (7,), (1,)).draw(8, CPU)
    torch.rand(3)
    assert torch.equal(EmbeddingNoise(ALPHA, (7,), (1,)).draw(8, CPU), first)
    assert not torch.equal(EmbeddingNoise(ALPHA, (7,), (2,)).draw(8, CPU), first)
    torch.set_rng_state(state)
    EmbeddingNoise(ALPHA, (7,), (1,)).draw(8, CPU)
    assert torch.equal(torch.get_rng_state(), state)


def gradients(model: PolicyModel, pack: PackTensors, noise: EmbeddingNoise | None) -> list[Tensor]:
    """The log-probs, and the gradients of their sum."""
    logprobs_L = model(pack, False, noise).logprobs_L
    logprobs_L.sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [logprobs_L.detach(), *found]


def test_noise_is_added_to_the_embeddings(path: Path) -> None:
    """Against transformers, given the same embeddings and noise as `inputs_embeds`."""
    model = load(path)
    pack, noise = packed(2)
    got = model(pack, False, noise).logprobs_L
    assert not torch.allclose(got, model(pack, False).logprobs_L, atol=1e-3)
    embedded_TH = model.lm.get_input_embeddings()(pack.tokens_T) + noise.draw(WIDTH, CPU)
    decoder = model.lm.get_decoder()
    decoder.config._attn_implementation = "eager"
    hidden_TH = decoder(inputs_embeds=embedded_TH[None], use_cache=False).last_hidden_state[0]
    logits_TV = hidden_TH[:-1] @ model.lm.get_input_embeddings().weight.T
    want = logits_TV.log_softmax(-1).gather(1, pack.tokens_T[1:, None])[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_noise_whatever_it_is_packed_with(path: Path) -> None:
    model = load(path)
    whole = model(*_call(packed(0, 1, 2))).logprobs_L
    parts = [model(*_call(packed(*chosen))).logprobs_L for chosen in ((0,), (1, 2))]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)


def _call(found: tuple[PackTensors, EmbeddingNoise]) -> tuple[PackTensors, bool, EmbeddingNoise]:
    return found[0], False, found[1]


def test_layers_that_are_computed_again_see_the_same_noise(path: Path) -> None:
    plain, again = (
        gradients(load(path, checkpointing=checkpointing), *packed(0, 2))
        for checkpointing in (False, True)
    )
    for got, want in zip(again, plain, strict=True):
        assert torch.equal(got, want)


def test_noise_ends_with_the_forward_that_has_it(path: Path) -> None:
    model = load(path)
    pack, noise = packed(1)
    before = model(pack, False).logprobs_L
    noisy = model(pack, False, noise).logprobs_L
    assert torch.equal(model(pack, False).logprobs_L, before) and not torch.equal(noisy, before)


def test_noise_under_an_adapter_on_frozen_bfloat16_weights(path: Path) -> None:
    model = load(path, dtype="bfloat16", checkpointing=True)
    add_adapter(model, AdapterConfig(rank=2, alpha=4), str(path), seed=0)
    pack, noise = packed(0, 1)
    quiet, noisy = gradients(model, pack, None), gradients(model, pack, noise)
    assert not torch.equal(quiet[0], noisy[0])
    assert any(bool(gradient.any()) for gradient in noisy[1:])
