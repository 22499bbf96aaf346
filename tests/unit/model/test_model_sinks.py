"""Attention sinks, forward and backward, against their definition and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packed_cases import CPU, SMALL, alone, assert_same, together, write
from test_model_shared_prompts import GROUPS, samples_in
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from plimsoll.model.attention import (
    SDPA,
    VARLEN,
    Attended,
    PackLayout,
    Span,
    register_packed_attention,
    sdpa,
    spans,
)
from plimsoll.model.cpu import packed_attention
from plimsoll.model.tiny import tiny_config

torch.set_num_threads(1)

HEADS, GROUPS_OF_KEYS, WIDTH = 4, 2, 16
Kernel = Callable[[Attended], Tensor]


def attended(
    own: Sequence[int],
    shared: Sequence[int],
    window: int | None,
    dtype: torch.dtype = torch.float64,
    fills: int = 0,
    scaling: float = 0.3,
) -> Attended:
    """Random inputs of one layer that all learn; `own` and `shared` as of a `PackLayout`."""
    torch.manual_seed(0)
    tokens = sum(own) + fills

    def rows(heads: int) -> Tensor:
        made = torch.randn(1, tokens, heads, WIDTH, dtype=torch.float64).to(dtype)
        return made.transpose(1, 2).requires_grad_()

    sinks = (2 * torch.randn(HEADS, dtype=torch.float64)).to(dtype).requires_grad_()
    places = list(spans(own, shared))
    keys = [index for span in places for part in span[::-1] for index in _indices(part)]
    layout = PackLayout(
        tuple(own),
        tuple(shared),
        _borders([span.queries for span in places]),
        _borders([span.queries + span.before for span in places]),
        torch.tensor(keys) if any(shared) else None,
    )
    query, key, value = (rows(n) for n in (HEADS, GROUPS_OF_KEYS, GROUPS_OF_KEYS))
    return Attended(query, key, value, layout, scaling, window, None, sinks)


def attended_as(pack: Attended, device: torch.device, dtype: torch.dtype) -> Attended:
    """The same numbers elsewhere, all of which learn anew."""
    assert pack.sinks is not None

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, dtype).requires_grad_()

    layout = pack.layout
    keys_K = None if layout.keys_K is None else layout.keys_K.to(device)
    borders = layout.cu_queries.to(device), layout.cu_keys.to(device)
    return replace(
        pack,
        query=moved(pack.query),
        key=moved(pack.key),
        value=moved(pack.value),
        sinks=moved(pack.sinks),
        layout=PackLayout(layout.own, layout.shared, *borders, keys_K),
    )


def _indices(part: slice) -> range:
    return range(part.start, part.stop)


def _borders(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def by_transformers(pack: Attended) -> Tensor:
    """Each sequence by itself, by the eager attention of transformers' gpt-oss."""
    assert pack.scaling is not None
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.sinks = HEADS // GROUPS_OF_KEYS, pack.sinks
    outputs = []
    for own, shared in pack.layout.spans:
        query = pack.query[:, :, own]
        key, value = (torch.cat([x[:, :, shared], x[:, :, own]], 2) for x in (pack.key, pack.value))
        hidden = torch.ones(query.shape[2], key.shape[2]).triu(key.shape[2] - query.shape[2] + 1)
        if pack.window is not None:
            hidden += torch.ones_like(hidden).tril(key.shape[2] - query.shape[2] - pack.window)
        mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden > 0, -math.inf)
        outputs.append(eager_attention_forward(module, query, key, value, mask, pack.scaling)[0])
    return torch.cat(outputs, 1)


def by_cpu_kernel(pack: Attended) -> Tensor:
    sequences: tuple[Span, ...] = pack.layout.spans
    return packed_attention(pack.query, pack.key, pack.value, sequences, pack.scale, pack.sinks)


def gradients(kernel: Kernel, pack: Attended) -> list[Tensor]:
    """The output of all sequences, and the gradients of queries, keys, values and sinks."""
    assert pack.sinks is not None
    output = kernel(pack)[:, : sum(pack.layout.own)]
    grad = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    of = pack.query, pack.key, pack.value, pack.sinks
    return [output.detach(), *torch.autograd.grad(output, of, grad.to(output))]


PACKS = (
    ((50,), (0,)),
    ((50, 7, 1, 90, 33, 40), (0, 20, 20, 0, 0, 33)),
    ((1, 1, 64, 3), (0, 1, 0, 64)),
)
KERNELS = ((sdpa, None), (sdpa, 5), (by_cpu_kernel, None))


@pytest.mark.parametrize(("own", "shared"), PACKS)
@pytest.mark.parametrize(("kernel", "window"), KERNELS)
def test_kernels_equal_transformers(
    kernel: Kernel, window: int | None, own: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    pack = attended(own, shared, window, fills=9)
    for found, wanted in zip(
        gradients(kernel, pack), gradients(by_transformers, pack), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kernel", "window"), KERNELS)
def test_bfloat16_loses_no_more_than_rounding(kernel: Kernel, window: int | None) -> None:
    """The scale of the scores is no power of two."""
    pack = attended((50, 33), (0, 20), window, torch.bfloat16)
    wide = attended_as(pack, CPU, torch.float64)
    for found, wanted in zip(
        gradients(kernel, pack), gradients(by_transformers, wide), strict=True
    ):
        assert (found.double() - wanted).norm() < 0.015 * wanted.norm()


def test_a_sink_worked_out_by_hand() -> None:
    """One query of one key with the score 0: a sink of log 3 takes three quarters.

    The output is v / 4. With the gradient 1, it changes by -v * 1/4 * 3/4 with the sink.
    """
    query, key, value = (torch.full((1, 1, 1, 8), x, requires_grad=True) for x in (0.0, 1.0, 2.0))
    sinks = torch.tensor([math.log(3)], requires_grad=True)
    layout = PackLayout((1,), (0,), _borders([1]), _borders([1]), None)
    for kernel in (sdpa, by_cpu_kernel):
        output = kernel(Attended(query, key, value, layout, None, None, None, sinks))
        torch.testing.assert_close(output, torch.full_like(output, 0.5))
        (found,) = torch.autograd.grad(output[0, 0, 0, 0], sinks)
        torch.testing.assert_close(found, torch.tensor([-2 * 3 / 16]))


@pytest.mark.parametrize("frozen", [sdpa, by_cpu_kernel])
def test_sinks_may_be_frozen(frozen: Kernel) -> None:
    pack = attended((50, 7), (0, 20), None)
    wanted = torch.autograd.grad(frozen(pack).sum(), pack.query)
    assert pack.sinks is not None
    pack.sinks.requires_grad_(False)
    assert torch.equal(*wanted, *torch.autograd.grad(frozen(pack).sum(), pack.query))


def test_the_private_operations_have_the_schema_that_sinks_call() -> None:
    """A torch that changes them must fail here, not on a card."""
    forward, backward = (
        [(a.name, str(a.type)) for a in operation.default._schema.arguments]
        for operation in (
            torch.ops.torch_attn._varlen_attn,
            torch.ops.torch_attn._varlen_attn_backward,
        )
    )
    tensors, number = ("Tensor", "Optional[Tensor]"), "int"
    places = [("cu_seq_q", tensors[0]), ("cu_seq_k", tensors[1]), ("max_q", number)]
    assert forward[:10] == [
        *((name, tensors[0]) for name in ("query", "key", "value")),
        *places,
        ("max_k", number),
        ("is_causal", "bool"),
        ("scale", "Optional[float]"),
        ("window_size", "Optional[List[int]]"),
    ]
    assert [name for name, _ in backward] == [
        *("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q"),
        *("max_k", "is_causal", "rng_state", "scale", "window_size"),
    ]
    assert len(torch.ops.torch_attn._varlen_attn.default._schema.returns) == 3


@pytest.mark.parametrize("kind", [False, True, "selective"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_decoder_equals_transformers(
    window: int | None, kind: bool | str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", tiny_config("gpt_oss", False, **SMALL, window=window))
    samples, shared = samples_in(GROUPS)
    wanted = alone(path, samples)
    assert sum("sinks" in name for name in wanted.gradients) == 2
    assert_same(together(path, samples, gradient_checkpointing=kind), wanted)
    assert_same(together(path, samples, shared=shared, gradient_checkpointing=kind), wanted)


def _by_definition(query: Tensor, key: Tensor, *places: Any, **form: Any) -> Any:
    """Yield (queries, keys, probability-free scores) of each sequence, [heads, Q, K]."""
    cu_queries, cu_keys, most_queries, most_keys, _, causal = places
    assert (int(cu_queries.diff().max()), int(cu_keys.diff().max())) == (most_queries, most_keys)
    left, right = form["window_size_left"], form["window_size_right"]
    assert causal == ((left, right) == (-1, 0))
    for i in range(len(cu_queries) - 1):
        rows, seen = (slice(int(c[i]), int(c[i + 1])) for c in (cu_queries, cu_keys))
        q, k = (x[part].transpose(0, 1).double() for x, part in ((query, rows), (key, seen)))
        k = k.repeat_interleave(len(q) // len(k), 0)
        at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        keys = torch.arange(k.shape[1])
        sees = (keys <= at + right) & ((keys >= at - left) if left >= 0 else True)
        yield rows, seen, (q @ k.mT * form["scale"]).masked_fill(~sees, -math.inf)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *places: Any, **form: Any) -> Any:
    """Return what `aten::_flash_attention_forward` gives: the output, and the log-sum-exps."""
    places = places[:6] if len(places) == 6 else places
    output, sums = torch.empty_like(query), []
    for rows, seen, scores in _by_definition(query, key, *places, **form):
        v = value[seen].transpose(0, 1).double().repeat_interleave(HEADS // GROUPS_OF_KEYS, 0)
        output[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        sums.append(scores.logsumexp(-1))
    return output, torch.cat(sums, 1).float(), None, None, None


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, **form: Any
) -> Any:
    """Return the gradients as flash attention computes them from output and log-sum-exps."""
    output, sums, *places = given
    found = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
    scale = form["scale"]
    for rows, seen, scores in _by_definition(query, key, *places[:6], **form):
        g, o, q = (x[rows].transpose(0, 1).double() for x in (grad, output, query))
        k, v = (
            x[seen].transpose(0, 1).double().repeat_interleave(len(q) // x.shape[1], 0)
            for x in (key, value)
        )
        weights = (scores - sums[:, rows, None].double()).exp()
        of_scores = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        found[0][rows] += (of_scores @ k).transpose(0, 1)
        for total, part in ((found[1], of_scores.mT @ q), (found[2], weights.mT @ g)):
            grouped = part.unflatten(0, (total.shape[1], -1)).sum(1)
            total[seen] += grouped.transpose(0, 1)
    return tuple(x.to(query.dtype) for x in found)


@pytest.mark.parametrize("kind", [False, "selective"])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_for_cards(window: int | None, kind: bool | str, tmp_path: Path) -> None:
    """Flash attention is replaced by its definition on a CPU."""
    path = write(tmp_path / "model", tiny_config("gpt_oss", False, **SMALL, window=window))
    samples, shared = samples_in(GROUPS)
    aten = torch.ops.aten
    with (
        patch.object(aten, "_flash_attention_forward", flash_forward),
        patch.object(aten, "_flash_attention_backward", flash_backward),
        patch("plimsoll.model.load.attention_name", lambda *_: VARLEN),
        patch("plimsoll.model.cpu.OF_PACKS", 1),  # on cards packs are not filled
    ):
        found = together(path, samples, shared=shared, gradient_checkpointing=kind)
    assert_same(found, alone(path, samples))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize(("own", "shared"), PACKS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", [VARLEN, SDPA])
def test_a_card_loses_no_more_than_rounding(
    kernel: str, window: int | None, own: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    register_packed_attention()
    here = attended(own, shared, window, torch.bfloat16)
    wanted = gradients(by_transformers, attended_as(here, CPU, torch.float64))
    there = attended_as(here, torch.device("cuda"), torch.bfloat16)

    def on_card(pack: Attended) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[kernel]
        tensors = pack.query, pack.key, pack.value, None
        form = {"layout": pack.layout, "scaling": pack.scaling, "sliding_window": pack.window}
        output: Tensor = attend(None, *tensors, **form, s_aux=pack.sinks)[0]
        return output

    for found, exact in zip(gradients(on_card, there), wanted, strict=True):
        assert (found.cpu().double() - exact).norm() < 0.02 * exact.norm()
