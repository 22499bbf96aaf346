"""Packed attention: a row holds several sequences, and each sequence attends only to itself.

It is registered with transformers' AttentionInterface under two names. So the model's own config
holds the choice, and any decoder that uses the interface works:

- `plimsoll_by_sequence`: scaled_dot_product_attention, sequence by sequence. Runs everywhere, in
  any dtype, with sliding windows, softcapped scores (Gemma 2) and attention sinks (gpt-oss).
- `plimsoll_varlen`: torch.nn.attention.varlen.varlen_attn, one kernel for the whole pack. CUDA
  in bfloat16, with sliding windows and attention sinks; it has no softcap.

Both read the pack's `PackLayout`, which transformers passes on as the keyword `layout`. A sequence
may share its first tokens with another (see `Pack.shared_S`). It then has keys for all its tokens,
but queries only for the tokens after the shared ones. No mask is built for the pack as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from plimsoll.errors import ConfigError
from plimsoll.model.sending import Arrays, send
from plimsoll.model.sinks import VarlenWithSinks, as_keys
from plimsoll.records import Ints, leaders

SDPA = "plimsoll_by_sequence"
"""A name without `sdpa`: transformers refuses such names for gpt-oss, as its kernel lacks sinks."""
VARLEN = "plimsoll_varlen"

_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
"""The keyword for fewer key heads than query heads; torch 2.11 needs none."""


class Span(NamedTuple):
    """The place of a sequence in a pack.

    Attributes:
        own: the rows of its queries.
        shared: the rows of the keys before the first query's, in order, such as of tokens that it
            shares with an earlier sequence.
        keys: the rows of the keys of the queries' own tokens.
    """

    own: slice
    shared: tuple[slice, ...]
    keys: slice

    @property
    def queries(self) -> int:
        """The number of queries."""
        return int(self.own.stop - self.own.start)

    @property
    def before(self) -> int:
        """The number of keys before the first query's."""
        return sum(int(rows.stop - rows.start) for rows in self.shared)


def spans(own: Sequence[int], shared: Sequence[int]) -> Iterator[Span]:
    """Yield the place of each sequence in a pack; parameters as the fields of `PackLayout`."""
    start = first = 0
    for tokens, before in zip(own, shared, strict=True):
        first = first if before else start
        rows = slice(start, start + tokens)
        yield Span(rows, (slice(first, first + before),) if before else (), rows)
        start += tokens


@dataclass(frozen=True, eq=False)
class PackLayout:
    """The places of the sequences of a pack, for all layers of a forward pass.

    Attributes:
        own: the number of tokens that the pack holds for each sequence.
        shared: the number of tokens before them that each sequence shares with its leader (see
            `records.leaders`).
        cu_queries: the borders of the sequences among the queries, int32, shape [S + 1].
        cu_keys: the borders of the sequences among the keys, int32, shape [S + 1].
        keys_K: the token of each key; None if the keys are all tokens in order.
        pieces: the places of parts of sequences, if keys have other rows than queries; see
            shards.py. `own` and `shared` then count each part's queries and the keys before them.
        exchange: computes attention by a kernel if several ranks share the pack; None: the kernel
            alone does.
        masks: a cache of masks, by the numbers of queries and keys, window, dtype, and whether a
            first key is a sink.
    """

    own: tuple[int, ...]
    shared: tuple[int, ...]
    cu_queries: Tensor
    cu_keys: Tensor
    keys_K: Tensor | None
    pieces: tuple[Span, ...] | None = None
    exchange: Callable[[Kernel, Attended], Tensor] | None = None
    masks: dict[tuple[int, int, int | None, torch.dtype, bool], Tensor] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, cu_seqlens: NDArray[np.int32], shared_S: Ints, device: torch.device) -> PackLayout:
        """Return the layout of a pack on a device; parameters as the fields of `records.Pack`."""
        return cls.over(cu_seqlens, shared_S, send(layout_arrays(cu_seqlens, shared_S), device))

    @classmethod
    def over(
        cls, cu_seqlens: NDArray[np.int32], shared_S: Ints, sent: Mapping[str, Tensor]
    ) -> PackLayout:
        """Return the layout of a pack whose `layout_arrays` are on a device already."""
        return cls(
            own=tuple(np.diff(cu_seqlens).tolist()),
            shared=tuple(shared_S.tolist()),
            cu_queries=sent["cu_queries"],
            cu_keys=sent["cu_keys"],
            keys_K=sent.get("keys_K"),
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The place of each sequence, or of each part of one."""
        return tuple(spans(self.own, self.shared)) if self.pieces is None else self.pieces

    @property
    def most_queries(self) -> int:
        """The largest number of queries of a sequence."""
        return max(self.own)

    @property
    def most_keys(self) -> int:
        """The largest number of keys of a sequence."""
        return max(own + shared for own, shared in zip(self.own, self.shared, strict=True))


def layout_arrays(cu_seqlens: NDArray[np.int32], shared_S: Ints) -> Arrays:
    """Return the arrays of a `PackLayout`, by field; parameters as the fields of `records.Pack`."""
    return {
        "cu_queries": cu_seqlens,
        "cu_keys": np.cumsum([0, *(np.diff(cu_seqlens) + shared_S)], dtype=np.int32),
        "keys_K": _keys(cu_seqlens, shared_S) if shared_S.any() else None,
    }


def _keys(cu_seqlens: NDArray[np.int32], shared_S: Ints) -> Ints:
    """Return the indices of the tokens that each sequence attends to, sequence after sequence."""
    starts_S, ends_S = cu_seqlens[:-1], cu_seqlens[1:]
    firsts_S = starts_S[leaders(shared_S)]
    begins = map(np.arange, firsts_S, firsts_S + shared_S)
    rests = map(np.arange, starts_S, ends_S)
    return np.concatenate([part for both in zip(begins, rests, strict=True) for part in both])


@dataclass(frozen=True, eq=False)
class Attended:
    """The inputs of one layer's attention.

    Attributes:
        query: shape [1, heads, T, D]. T may exceed the pack's tokens; the rest belongs to no
            sequence.
        key: shape [1, kv heads, T, D].
        value: shape [1, kv heads, T, D].
        layout: the places of the sequences.
        scaling: the factor of the scores; None: 1 / sqrt(D).
        window: how many keys a query sees, its own included; None: all before it.
        softcap: the bound of the scores; None: they have none.
        sinks: a score for each head of the queries (see `sinks.py`), shape [heads]; None: without.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: PackLayout
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def window_within(self, keys: int) -> int | None:
        """Return the window if it is smaller than `keys`, else None: it then hides no key."""
        return self.window if self.window is not None and keys > self.window else None


Kernel = Callable[[Attended], Tensor]
"""Computes the output of attention, [1, T, heads, D]."""


class _Sequence(NamedTuple):
    """The queries, keys and values of one sequence."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class _WindowMask:
    """A stand-in for the mask of a layer with a sliding window; see `Attended.window`."""

    window: int


def register_packed_attention() -> None:
    """Register both kernels with transformers."""
    register_kernel(SDPA, sdpa)
    register_kernel(VARLEN, _varlen)


def register_kernel(name: str, kernel: Kernel) -> None:
    """Register a kernel with transformers. A second call changes nothing."""
    AttentionInterface.register(name, partial(_attend, kernel))
    AttentionMaskInterface.register(name, _mask_for)


def _mask_for(*_: object, local_size: int | None = None, **__: object) -> _WindowMask | None:
    """Return a stand-in for the mask that holds the layer's window; None without a window.

    Some families (Qwen2-MoE) pass the window only in the mask.
    """
    return None if local_size is None else _WindowMask(local_size)


def _attend(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _WindowMask | None,
    *,
    layout: PackLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers; the output is [1, T, heads, D]."""
    if isinstance(attention_mask, _WindowMask):
        sliding_window, attention_mask = attention_mask.window, None
    _refuse_unknown(attention_mask, dropout, s_aux is not None and softcap is not None)
    if layout is None:
        raise ConfigError(
            f"{type(module).__name__} does not get the places of a pack's sequences: its model "
            "does not pass on the arguments of its forward. Choose a model of another family."
        )
    pack = Attended(query, key, value, layout, scaling, sliding_window, softcap, s_aux)
    return (kernel(pack) if layout.exchange is None else layout.exchange(kernel, pack)), None


def sdpa(pack: Attended) -> Tensor:
    """Compute attention by PyTorch's own kernels, one sequence at a time."""
    if pack.sinks is not None:  # their gradients from all sequences are added up in fp32
        wide = torch.promote_types(pack.sinks.dtype, torch.float32)
        pack = replace(pack, sinks=pack.sinks.to(wide))
    if pack.layout.pieces is not None:
        return _attend_pieces(pack)
    # split and cat: the backward pass of slices adds every one into a gradient of full size.
    lengths = pack.layout.own
    fills = pack.query.shape[2] - sum(lengths)
    parts = (x.split((*lengths, fills), 2)[:-1] for x in (pack.query, pack.key, pack.value))
    sequences = [_Sequence(*tensors) for tensors in zip(*parts, strict=True)]
    leader, outputs = sequences[0], []
    for sequence, shared in zip(sequences, pack.layout.shared, strict=True):
        leader = leader if shared else sequence
        if shared:
            output = _attend_behind(leader, sequence, shared, pack)
        else:
            output = _one_sequence(sequence, pack)
        outputs.append(output.transpose(1, 2))
    if fills:
        outputs.append(torch.zeros_like(outputs[0][:, :1]).expand(-1, fills, -1, -1))
    return torch.cat(outputs, dim=1)


def _attend_pieces(pack: Attended) -> Tensor:
    """Compute attention of parts of sequences, whose keys are among the rows of all ranks."""
    layout, keys_K = pack.layout, pack.layout.keys_K
    assert keys_K is not None
    key, value = (x.index_select(2, keys_K) for x in (pack.key, pack.value))
    counts = [own + before for own, before in zip(layout.own, layout.shared, strict=True)]
    parts = (pack.query.split(layout.own, 2), key.split(counts, 2), value.split(counts, 2))
    sequences = (_Sequence(*tensors) for tensors in zip(*parts, strict=True))
    return torch.cat([_one_sequence(one, pack).transpose(1, 2) for one in sequences], 1)


def _attend_behind(leader: _Sequence, sequence: _Sequence, shared: int, pack: Attended) -> Tensor:
    query, key, value = sequence
    key, value = (
        torch.cat([begin[:, :, :shared], rest], 2)
        for begin, rest in ((leader.key, key), (leader.value, value))
    )
    if (
        shared < query.shape[2]
        and pack.softcap is None
        and pack.sinks is None
        and pack.window_within(key.shape[2]) is None
    ):
        # The kernel's own causal mask skips the keys that a query does not see, but needs as many
        # queries as keys: recomputing the queries of a short prompt is worth it.
        query = torch.cat([leader.query[:, :, :shared], query], 2)
        return _one_sequence(_Sequence(query, key, value), pack)[:, :, shared:]
    return _one_sequence(_Sequence(query, key, value), pack)


def _one_sequence(sequence: _Sequence, pack: Attended) -> Tensor:
    query, key, value = sequence
    window = pack.window_within(key.shape[2])
    if pack.sinks is not None:
        mask = _mask(pack.layout, query, key.shape[2], window, sink=True)
        widened = as_keys(query, key, value, pack.sinks, pack.scale)
        return dot_product(*widened, mask, pack.scale)[..., : value.shape[-1]]
    if pack.softcap is None and window is None and query.shape[2] == key.shape[2]:
        return dot_product(query, key, value, None, pack.scaling)
    mask = _mask(pack.layout, query, key.shape[2], window)
    if pack.softcap is not None:
        return _softcap_attention(query, key, value, mask, pack.scale, pack.softcap)
    return dot_product(query, key, value, mask, pack.scaling)


def dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return softmax(scale * query @ key + mask) @ value; causal without a mask.

    query [1, heads, Q, D]; key, value [1, kv heads, K, D]; mask [Q, K].

    On CUDA only the flash kernel takes fewer key heads than query heads. If it cannot run (no
    bfloat16, a card below compute capability 8.0, a mask), PyTorch would compute grouped heads by
    plain products, with a score for each query and key (sdp_utils.cpp,
    check_batch_size_and_num_heads_dense). The memory-efficient kernel runs there, once keys and
    values are repeated for every head.
    """
    causal = mask is None
    if query.is_cuda and not can_use_flash_attention(
        SDPAParams(query, key, value, mask, 0.0, causal, True)
    ):
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def repeat_heads(keys: Tensor, heads: int) -> Tensor:
    """Return keys or values with each head repeated for its query heads, [1, heads, K, D]."""
    groups = keys.shape[1]
    return keys[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)


def _mask(
    layout: PackLayout, query: Tensor, keys: int, window: int | None, sink: bool = False
) -> Tensor:
    """Return a mask: 0 where a query attends to a key, -inf elsewhere.

    A query attends to its own key and, with a window, to the window - 1 keys before it. The queries
    belong to the last keys. Before all keys may stand a sink, which every query sees.
    """
    queries = query.shape[2]
    kind = (queries, keys, window, query.dtype, sink)
    if kind not in layout.masks:
        mask = query.new_full((queries, keys), float("-inf")).triu_(keys - queries + 1)
        if window is not None:
            mask += torch.full_like(mask, float("-inf")).tril_(keys - queries - window)
        layout.masks[kind] = pad(mask, (1, 0)) if sink else mask
    return layout.masks[kind]


def _softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Return softmax(cap * tanh(scores / cap)) @ value with fp32 scores; PyTorch has no kernel."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped.float() @ key.float().transpose(2, 3).unsqueeze(2) * scale
    scores = (scores / softcap).tanh() * softcap + mask
    weights = scores.softmax(-1).to(value.dtype)
    output: Tensor = (weights @ value.unsqueeze(2)).flatten(1, 2)
    return output


def _varlen(pack: Attended) -> Tensor:
    assert pack.softcap is None, "load refuses varlen for a model with softcapped attention"
    layout = pack.layout
    query, key, value = (x[0].transpose(0, 1) for x in (pack.query, pack.key, pack.value))
    if layout.keys_K is not None:
        key, value = (x.index_select(0, layout.keys_K) for x in (key, value))
    places = layout.cu_queries, layout.cu_keys, layout.most_queries, layout.most_keys
    # The window counts the keys before the query's own. Flash attention aligns a sequence's last
    # query with its last key (torch/nn/attention/bias.py, CausalVariant.LOWER_RIGHT).
    window = (-1 if pack.window is None else pack.window - 1, 0)
    if pack.sinks is not None:
        form = {"is_causal": pack.window is None, "scale": pack.scaling, "window_size": [*window]}
        output_THD = VarlenWithSinks.apply(query, key, value, pack.sinks, places, form, _GROUPED)
    else:
        output_THD = varlen_attn(
            query, key, value, *places, scale=pack.scaling, window_size=window, **_GROUPED
        )
    assert isinstance(output_THD, Tensor)
    return output_THD[None]


def _refuse_unknown(mask: Tensor | None, dropout: float, both: bool) -> None:
    if mask is not None or dropout or both:
        raise ConfigError(
            "Packed attention cannot compute these inputs: a mask: "
            f"{mask is not None}, dropout: {dropout}, softcapped scores with attention sinks: "
            f"{both}. Packs need neither mask nor dropout; no known model has the last two."
        )
