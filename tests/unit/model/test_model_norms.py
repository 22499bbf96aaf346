"""Llama's norm as one function against transformers' own modules."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from decided import decided_model
from fused_cases import fused_in, kept_by
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PhiConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from plimsoll.model import logit_chunks
from plimsoll.model.fused import NORM, fuse
from plimsoll.model.load import load_policy, load_teacher, load_value
from plimsoll.model.tiny import Family, tiny_config, write_tiny_model

CPU = torch.device("cpu")
LLAMAS: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")


def a_norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, 1e-5)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm.to(dtype)


def passed(
    norm: LlamaRMSNorm, inputs: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, and the gradients of the input and of the weight."""
    leaf = inputs.clone().requires_grad_()
    output: Tensor = norm(leaf)
    output.backward(slopes.to(output.dtype))
    assert leaf.grad is not None
    return output.detach(), leaf.grad, norm.weight.grad


def compare(own: LlamaRMSNorm, inputs: Tensor, rtol: float) -> None:
    """Values to the bit where they are rounded, gradients within rtol of the largest."""
    fused = deepcopy(own)
    fuse(fused, [NORM])
    slopes = torch.randn(inputs.shape).to(inputs.dtype)
    (wanted, *gradients), (found, *made) = (passed(n, inputs, slopes) for n in (own, fused))
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, made, strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=rtol, atol=rtol * float(one.abs().max()))


@pytest.mark.parametrize("block", [1, 200, 2**18])
@pytest.mark.parametrize("shape", [(37, 64), (1, 37, 64), (2, 9, 4, 16)], ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_it_computes_as_transformers_does(
    dtype: torch.dtype,
    rtol: float,
    shape: tuple[int, ...],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logit_chunks, "BLOCK_ELEMENTS_CPU", block)
    torch.manual_seed(0)
    compare(a_norm(shape[-1], dtype), torch.randn(shape).to(dtype), rtol)


def test_an_fp32_weight_makes_the_result_of_a_bf16_input_fp32() -> None:
    torch.manual_seed(0)
    compare(a_norm(32, torch.float32), torch.randn(11, 32).bfloat16(), 2**-7)


@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 40),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 999),
)
def test_any_size_and_scale(rows: int, width: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = scale * torch.randn(rows, width)
    own, wide = a_norm(width, torch.float32), deepcopy(inputs).double().requires_grad_()
    fused = deepcopy(own)
    fuse(fused, [NORM])
    slopes = torch.randn(rows, width)
    output, of_input, of_weight = passed(fused, inputs, slopes)
    # The equation in fp64: gradients that nearly vanish are rounded differently by transformers.
    weight = own.weight.detach().double().requires_grad_()
    exact = weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    wanted = torch.autograd.grad((exact * slopes).sum(), (wide, weight))
    roots = wide.detach().square().mean(-1).add(1e-5).sqrt()
    steepest = float((weight.detach().abs().max() / roots).max())
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_input.double(), wanted[0], rtol=1e-5, atol=1e-5 * steepest)
    assert of_weight is not None
    torch.testing.assert_close(of_weight.double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    torch.manual_seed(0)
    own, inputs, slopes = a_norm(16, torch.float32), torch.randn(5, 16), torch.randn(5, 16)
    own.weight.requires_grad_(False)
    fused = deepcopy(own)
    fuse(fused, [NORM])
    _, wanted, _ = passed(own, inputs, slopes)
    _, found, of_weight = passed(fused, inputs, slopes)
    assert of_weight is None
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    fused.weight.requires_grad_(True)
    fused(inputs).backward(slopes)  # of the input, nothing is asked
    own.weight.requires_grad_(True)
    own(inputs).backward(slopes)
    torch.testing.assert_close(fused.weight.grad, own.weight.grad, rtol=1e-6, atol=1e-6)


def test_queries_that_are_transposed_afterwards() -> None:
    """Qwen3's are: their gradient comes in another order of its dimensions."""
    torch.manual_seed(0)
    own = a_norm(16, torch.float32)
    fused = deepcopy(own)
    fuse(fused, [NORM])
    inputs, slopes = torch.randn(1, 7, 3 * 16), torch.randn(1, 3, 7, 16)
    found = []
    for norm in (own, fused):
        leaf = inputs.clone().requires_grad_()
        norm(leaf.view(1, 7, 3, 16)).transpose(1, 2).backward(slopes)
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_the_input_and_a_number_for_each_row_are_kept() -> None:
    norm, inputs = a_norm(64, torch.bfloat16), torch.randn(1, 40, 64).bfloat16().requires_grad_()
    fuse(norm, [NORM])
    kept = kept_by(lambda: norm(inputs))
    sizes = {(tensor.untyped_storage().data_ptr(), tensor.nbytes) for tensor in kept}
    assert len(kept) == 3
    assert sizes >= {(inputs.data_ptr(), 2 * 40 * 64), (norm.weight.data_ptr(), 2 * 64)}
    assert sum(size for _, size in sizes) == 2 * 40 * 64 + 2 * 64 + 4 * 40


@pytest.mark.parametrize("family", LLAMAS)
def test_families_whose_norms_are_written_as_llamas(family: Family) -> None:
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if family == "qwen3" else []
    wanted = {f"model.layers.{i}.{part}" for i in range(2) for part in parts}
    assert fused_in(tiny_config(family, True), [NORM]) == wanted | {"model.norm"}


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_gemmas_norms_stay_as_they_are(family: Family) -> None:
    assert fused_in(tiny_config(family, True), [NORM]) == set()


def test_layer_norms_stay_as_they_are() -> None:
    phi = PhiConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    assert fused_in(phi, [NORM]) == set()


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_every_role_is_loaded_with_fused_norms(quantization: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tiny_config("qwen2", True), seed=0, tokenizer=None)
    config = decided_model(str(tmp_path / "model"), dtype="bfloat16", quantization=quantization)
    models = [load_policy(config, CPU), load_value(config, CPU, seed=0), load_teacher(config, CPU)]
    for model in models:
        lm: Any = model.lm
        norm = lm.get_decoder().norm
        inputs = torch.randn(3, 64).to(norm.weight.dtype).requires_grad_()
        assert type(norm(inputs).grad_fn).__name__ == "_RmsNormBackward"


def test_a_copy_computes_with_its_own_weight() -> None:
    norm = a_norm(8, torch.float32)
    fuse(norm, [NORM])
    copy = deepcopy(norm)
    torch.nn.init.zeros_(copy.weight)
    assert not copy(torch.ones(2, 8)).any() and norm(torch.ones(2, 8)).any()
