"""Packed attention on the CPU, forward and backward, against its definition in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import CPU, LENGTHS, SMALL, samples_of, settings_for, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.data.packing import pack_one
from plimsoll.model.attention import Span, spans
from plimsoll.model.cpu import NAME, OF_PACKS, packed_attention
from plimsoll.model.load import load_policy
from plimsoll.model.logit_chunks import LogitForm, fill_rows
from plimsoll.model.policy import PackTensors
from plimsoll.model.tiny import tiny_config

SCALE, WIDTH = 0.25, 16


def by_definition(query: Tensor, key: Tensor, value: Tensor, sequences: Sequence[Span]) -> Tensor:
    """Each sequence by itself, its scores written out; [1, T, heads, D]."""
    outputs = []
    for own, shared, rows in sequences:
        queries = query[:, :, own]
        keys, values = (
            torch.cat([x[:, :, its_rows] for its_rows in (*shared, rows)], 2) for x in (key, value)
        )
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = queries @ keys.transpose(2, 3) * SCALE
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        hidden = hidden.triu(scores.shape[-1] - scores.shape[-2] + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ values).transpose(1, 2))
    return torch.cat(outputs, 1)


def inputs(sequences: Sequence[Span], heads: int, kv_heads: int, fills: int = 0) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, laid out as a model lays them."""
    generator = torch.Generator().manual_seed(0)
    tokens = sequences[-1].own.stop + fills

    def rows(each: int) -> Tensor:
        return torch.randn(1, tokens, each, WIDTH, generator=generator, dtype=torch.float64)

    return [
        *(rows(each).transpose(1, 2) for each in (heads, kv_heads, kv_heads)),
        rows(heads),
    ]


def gradients(output: Tensor, grad: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of what it was made from."""
    return [output.detach(), *torch.autograd.grad(output, of, grad)]


def found(given_: Sequence[Tensor], sequences: Sequence[Span], dtype: torch.dtype) -> list[Tensor]:
    """Ours in a dtype."""
    query, key, value, grad = (x.to(dtype) for x in given_)
    of = [x.requires_grad_() for x in (query, key, value)]
    return gradients(packed_attention(query, key, value, sequences, SCALE), grad, of)


def exact(given_: Sequence[Tensor], sequences: Sequence[Span]) -> list[Tensor]:
    """By definition, without the rows that fill."""
    tokens = sequences[-1].own.stop
    *of, grad = given_
    query, key, value = (x[:, :, :tokens].clone().requires_grad_() for x in of)
    output = by_definition(query, key, value, sequences)
    return gradients(output, grad[:, :tokens], (query, key, value))


CASES = (
    ((50,), (0,)),
    ((50, 7, 1, 90, 33, 40), (0, 20, 20, 0, 0, 33)),
    ((1, 1, 64, 3), (0, 1, 0, 64)),
    ((40, 10, 12, 9, 33, 60), (0, 40, 40, 40, 0, 0)),  # three alike that share, then three alike
)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (4, 1)])
@pytest.mark.parametrize("own, shared", CASES)
def test_each_sequence_sees_itself_and_what_it_shares(
    own: tuple[int, ...], shared: tuple[int, ...], heads: tuple[int, int]
) -> None:
    sequences = tuple(spans(own, shared))
    given_ = inputs(sequences, *heads)
    for one, other in zip(
        found(given_, sequences, torch.float64), exact(given_, sequences), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=percent(25))
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=5),
    st.sampled_from([(1, 1024), (2**20, 64), (2**20, 1024)]),
)
def test_blocks_and_batches_change_nothing(
    pairs: list[tuple[int, int]], limits: tuple[int, int]
) -> None:
    """Compute 32 queries at a time, one or two sequences, or all of one shape.

    A sequence shares at most the own tokens of the sequence before.
    """
    own = [tokens for tokens, _ in pairs]
    shared, first = [0], own[0]
    for tokens, before in pairs[1:]:
        shared.append(min(before, first))
        first = first if shared[-1] else tokens
    sequences = tuple(spans(own, shared))
    given_ = inputs(sequences, 4, 2)
    with patch.multiple("plimsoll.model.cpu", SCORES=limits[0], ROWS=limits[1]):
        parts = found(given_, sequences, torch.float32)
    for one, other in zip(parts, exact(given_, sequences), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_no_further_off_than_pytorchs_own() -> None:
    own = (120, 64, 200)
    sequences = tuple(spans(own, (0, 0, 0)))
    given_ = inputs(sequences, 8, 4)
    *of, grad = (x.bfloat16() for x in given_)
    of = [x.requires_grad_() for x in of]
    parts = zip(*(x.split(own, 2) for x in of), strict=True)
    outputs = [
        scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
        )
        for query, key, value in parts
    ]
    theirs = gradients(torch.cat([x.transpose(1, 2) for x in outputs], 1), grad, of)
    rounded = exact([x.bfloat16().double() for x in given_], sequences)
    ours = found(given_, sequences, torch.bfloat16)
    for one, other, truth in zip(ours, theirs, rounded, strict=True):
        assert (one.double() - truth).norm() <= 1.05 * (other.double() - truth).norm()


@pytest.mark.parametrize("dtype, within", [(torch.bfloat16, "bf16"), (torch.float32, "ieee")])
def test_products_of_other_numbers_are_not_narrowed(dtype: torch.dtype, within: str) -> None:
    """Products of the backward pass are narrowed if the numbers were bfloat16 before."""
    backend: Any = torch.backends.mkldnn
    settings_ = backend.matmul
    seen: list[str] = []

    def softmax_backward(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(settings_.fp32_precision)
        return backward(*args, **kwargs)

    backward = torch._softmax_backward_data
    before = settings_.fp32_precision
    sequences = tuple(spans((40, 9), (0, 0)))
    settings_.fp32_precision = "ieee"
    try:
        with patch("torch._softmax_backward_data", softmax_backward):
            found(inputs(sequences, 4, 2), sequences, dtype)
        assert set(seen) == {within} and settings_.fp32_precision == "ieee"
    finally:
        settings_.fp32_precision = before


def test_rows_that_fill_are_zero_and_learn_nothing() -> None:
    sequences = tuple(spans((40, 9), (0, 12)))
    given_ = inputs(sequences, 4, 2, fills=15)
    output, *found_ = found(given_, sequences, torch.float64)
    for one, other in zip((output.transpose(1, 2), *found_), exact(given_, sequences), strict=True):
        assert not one[:, :, 49:].any()
        other = other.transpose(1, 2) if other.shape[1] == 49 else other
        torch.testing.assert_close(one[:, :, :49], other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [0, 1, OF_PACKS - 1, OF_PACKS, OF_PACKS + 1])
@pytest.mark.parametrize("width", [None, 3])
def test_rows_are_filled_to_a_multiple(rows: int, width: int | None) -> None:
    shape = (rows,) if width is None else (rows, width)
    whole = fill_rows(torch.ones(shape), OF_PACKS)
    assert len(whole) % OF_PACKS == 0 and len(whole) - rows < OF_PACKS
    assert whole.sum() == whole[:rows].sum() == torch.ones(shape).sum()


def test_rows_are_unchanged_with_a_multiple_of_1() -> None:
    rows = torch.ones(5, 3)
    assert fill_rows(rows, LogitForm().rows) is rows


class Called(TorchDispatchMode):
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations.add(func)
        return func(*args, **kwargs or {})


def test_tensors_of_another_device_are_pytorchs(tmp_path: Path) -> None:
    """A model loaded for the CPU may be moved to a card, which has no such kernel.

    Here it is moved to a device that computes nothing.
    """
    model = load_policy(settings_for(write(tmp_path, tiny_config("qwen2", True, **SMALL))), CPU)
    assert model.lm.config._attn_implementation == NAME
    elsewhere = torch.device("meta")
    pack = pack_one(samples_of(LENGTHS), range(len(LENGTHS)))
    with Called() as here:
        model(PackTensors.from_pack(pack, CPU))
    with Called() as there:
        found = model.to(elsewhere)(PackTensors.from_pack(pack, elsewhere)).logprobs_L
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert kernel in here.operations and kernel not in there.operations
    assert found.device == elsewhere and found.shape == (pack.loss_tokens,)
