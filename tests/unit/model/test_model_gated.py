"""Llama's gated MLP as one function against transformers' own modules."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from fused_cases import fused_in, kept_by
from torch import Tensor
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from plimsoll.model import logit_chunks
from plimsoll.model.fused import GATE, fuse
from plimsoll.model.tiny import Family, tiny_config

WIDTH, INNER = 16, 40


def an_mlp(dtype: torch.dtype, activation: str = "silu") -> LlamaMLP:
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 2}
    return LlamaMLP(LlamaConfig(**shape, hidden_act=activation)).to(dtype)


def passed(mlp: LlamaMLP, inputs: Tensor, slopes: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the weights."""
    leaf = inputs.clone().requires_grad_()
    output: Tensor = mlp(leaf)
    output.backward(slopes)
    gradients = (tensor.grad for tensor in (leaf, *mlp.parameters()))
    return [output.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("block", [1, 100, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_as_transformers_does(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_chunks, "BLOCK_ELEMENTS_CPU", block)
    own = an_mlp(dtype)
    fused = deepcopy(own)
    fuse(fused, [GATE])
    inputs, slopes = (torch.randn(1, 7, WIDTH, dtype=dtype) for _ in range(2))
    wanted, found = (passed(mlp, inputs, slopes) for mlp in (own, fused))
    assert len(found) == 5
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_the_activation_is_not_kept() -> None:
    mlp = an_mlp(torch.bfloat16)
    fuse(mlp, [GATE])
    kept = kept_by(lambda: mlp(torch.randn(9, WIDTH).bfloat16()))
    inner = {x.untyped_storage().data_ptr() for x in kept if x.shape == (9, INNER)}
    assert len(inner) == 3  # gate, up, and the product, which the last product saves


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_families_whose_mlps_are_written_as_llamas(family: Family) -> None:
    assert fused_in(tiny_config(family, True), [GATE]) == {
        f"model.layers.{i}.mlp" for i in range(2)
    }


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_gemmas_have_another_activation(family: Family) -> None:
    assert fused_in(tiny_config(family, True), [GATE]) == set()


def test_others_stay_as_they_are() -> None:
    phi = PhiConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    assert fused_in(phi, [GATE]) == set()
    mlp = an_mlp(torch.float32, "relu")
    fuse(mlp, [GATE])
    assert "forward" not in vars(mlp)
