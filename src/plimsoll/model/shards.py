"""Divide each pack over the ranks of a stream: sequence parallelism.

A rank (a shard of the stream) computes the decoder for its own rows of the pack. Only attention
reads other rows, by one of two exchanges around any kernel for packs:

- `heads` (Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): each rank gets all rows
  for its share of the heads, and gives back the results of the others' rows.
- `keys`: each rank gets the keys and values of all rows (Llama 3, Dubey et al. 2024,
  https://arxiv.org/abs/2407.21783, section 3.3.2). It has one range of rows near the beginning and
  one near the end of the pack, so that ranks have about as many keys to look at.

What a model returns for a pack is the same on all shards, and its gradient flows to a shard's own
rows alone. So losses, which are shares of a mean over the step, need not know of shards: engines
add up gradients over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from plimsoll.config.cluster import DecidedExchange
from plimsoll.model.attention import Attended, Kernel, PackLayout, Span, layout_arrays
from plimsoll.model.cpu import OF_PACKS
from plimsoll.model.sending import send
from plimsoll.records import Ints

_RANGES = 2
"""Ranges of rows of a rank with the exchange `keys`; the rows of a pack are filled to fit."""


@dataclass(eq=False)
class Shard:
    """The place of a rank among those that share the packs of a stream.

    Attributes:
        index: The number of the rank in the stream.
        count: How many ranks share a pack.
        exchange: What they exchange for attention.
        group: Their process group; None: that of all ranks.
        around: Returns the block in which each exchange runs; see `guard`.
    """

    index: int
    count: int
    exchange: DecidedExchange
    group: dist.ProcessGroup | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def guard(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Run each exchange in the block inside `around()`."""
        before, self.around = self.around, around
        try:
            yield
        finally:
            self.around = before

    def swap(self, sent: Tensor) -> Tensor:
        """Send each rank its row of `sent`, [ranks, ...]; return what they sent to this one."""
        got = torch.empty_like(sent)
        with self.around():
            dist.all_to_all_single(got, sent, group=self.group)
        return got

    def gather(self, own: Tensor) -> Tensor:
        """Return the equally large tensors of all ranks, one after another, [ranks * n, ...]."""
        got = own.new_empty((self.count * len(own), *own.shape[1:]))
        with self.around():
            dist.all_gather_into_tensor(got, own.contiguous(), group=self.group)
        return got

    def add(self, own: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks."""
        total = own.clone()
        with self.around():
            dist.all_reduce(total, group=self.group)
        return total


def open_shard(rank: int, ranks: int, shards: int, exchange: DecidedExchange) -> Shard | None:
    """Return the place of a rank in its stream, and make all streams' process groups; None: alone.

    All ranks must call it. `shards` consecutive ranks are a stream.
    """
    if shards == 1:
        return None
    if shards == ranks:  # the group of all
        return Shard(rank, shards, exchange)
    groups = [dist.new_group(range(first, first + shards)) for first in range(0, ranks, shards)]
    return Shard(rank % shards, shards, exchange, groups[rank // shards])


@dataclass(frozen=True, eq=False)
class PackShare:
    """What a shard computes of one pack.

    Attributes:
        shard: The shard.
        ranges: Its rows, as ranges of the filled pack.
        rows: The number of rows of the filled pack.
        layout: The places of sequences, for attention.
        predictor_L: The places of the shard's predictors among its rows, [own L].
        own_L: Which of the pack's learned tokens they predict, [own L].
        place_L: The place of each learned token among the gathered ones of all shards, [L].
        most: The most learned tokens of a shard, at least 1.
    """

    shard: Shard
    ranges: tuple[slice, ...]
    rows: int
    layout: PackLayout
    predictor_L: Tensor
    own_L: Tensor
    place_L: Tensor
    most: int

    def take(self, rows_T: Tensor, fill: int = 0) -> Tensor:
        """Return the shard's rows of a tensor with a row for each token; `fill` is in the fill."""
        fills = [0, 0] * (rows_T.ndim - 1) + [0, self.rows - len(rows_T)]
        filled = pad(rows_T, fills, value=fill)
        return torch.cat([filled[rows] for rows in self.ranges])

    def whole(self, own: Tensor) -> Tensor:
        """Return numbers of the whole pack, given those of the shard.

        A scalar is the sum of the shards'; [own L] becomes [L]. The gradient of the result flows to
        the shard's own numbers, and is not added over shards.
        """
        if own.ndim == 0:
            total: Tensor = _Sum.apply(own, self.shard)
            return total
        gathered: Tensor = _Gather.apply(own, self)
        return gathered


def share_pack(
    layout: PackLayout, predictor_L: Ints, shard: Shard, device: torch.device
) -> PackShare:
    """Return what a shard computes of a pack.

    The pack is filled up with a sequence of its own, so that every row belongs to a sequence, and
    ranks have equally many.

    Args:
        layout: The places of the pack's sequences.
        predictor_L: The rows that predict the learned tokens, in host memory.
        shard: The shard.
        device: Where it computes.
    """
    # On a CPU the decoder would fill each rank's rows (model/cpu.py).
    unit = shard.count * (OF_PACKS if device.type == "cpu" else _RANGES)
    tokens = sum(layout.own)
    rows = -(-tokens // unit) * unit
    fill = (rows - tokens,) if rows > tokens else ()
    own, shared = (*layout.own, *fill), (*layout.shared, *(0 for _ in fill))
    ranges = [_ranges(rows, index, shard) for index in range(shard.count)]

    owner_T, place_T = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for index, its_ranges in enumerate(ranges):
        its_rows = np.concatenate([np.arange(r.start, r.stop) for r in its_ranges])
        owner_T[its_rows], place_T[its_rows] = index, np.arange(len(its_rows))
    owner_L = owner_T[predictor_L]
    counts = np.bincount(owner_L, minlength=shard.count)
    # At least one: streams make equally many exchanges, also if nothing of a pack is learned.
    own_L, most = np.flatnonzero(owner_L == shard.index), max(1, int(counts.max()))
    place_L = np.empty_like(owner_L)
    place_L[np.argsort(owner_L, kind="stable")] = np.concatenate(
        [index * most + np.arange(count) for index, count in enumerate(counts)]
    )
    arrays = {
        "predictor_L": place_T[predictor_L[own_L]],
        "own_L": own_L,
        "place_L": place_L,
    }
    if shard.exchange == "heads":
        cu_seqlens = np.cumsum([0, *own], dtype=np.int32)
        arrays |= layout_arrays(cu_seqlens, np.array(shared))
        sent = send(arrays, device)
        exchanged = PackLayout.over(cu_seqlens, np.array(shared), sent)
        exchanged = replace(exchanged, exchange=HeadExchange(shard))
    else:
        pieces = _pieces(own, shared, ranges, shard.index)
        arrays |= _piece_arrays(pieces)
        sent = send(arrays, device)
        exchanged = PackLayout(
            own=tuple(piece.queries for piece in pieces),
            shared=tuple(piece.before for piece in pieces),
            cu_queries=sent["cu_queries"],
            cu_keys=sent["cu_keys"],
            keys_K=sent["keys_K"],
            pieces=pieces,
            exchange=KeyExchange(shard),
        )
    return PackShare(
        shard,
        ranges[shard.index],
        rows,
        exchanged,
        sent["predictor_L"],
        sent["own_L"],
        sent["place_L"],
        most,
    )


def _ranges(rows: int, index: int, shard: Shard) -> tuple[slice, ...]:
    """Return the rows of a rank, in the order of the pack."""
    if shard.exchange == "heads":
        each = rows // shard.count
        return (slice(index * each, (index + 1) * each),)
    each = rows // (_RANGES * shard.count)
    last = _RANGES * shard.count - 1 - index
    return (
        slice(index * each, (index + 1) * each),
        slice(last * each, (last + 1) * each),
    )


def _pieces(
    own: Sequence[int], shared: Sequence[int], ranges: Sequence[Sequence[slice]], index: int
) -> tuple[Span, ...]:
    """Return the parts of sequences whose queries a rank has.

    The rows of their keys count in the order in which they are gathered: rank after rank.

    Args:
        own: The tokens of each sequence, as in `PackLayout`.
        shared: The tokens that each sequence shares, as there.
        ranges: The rows of each rank.
        index: The rank.
    """
    each = ranges[0][0].stop - ranges[0][0].start
    gathered = {r.start // each: n for n, r in enumerate(r for rank in ranges for r in rank)}

    def keys(start: int, stop: int) -> Iterator[slice]:
        """Yield the gathered rows of the pack's rows from `start` to before `stop`."""
        borders = [start, *range((start // each + 1) * each, stop, each), stop]
        for begin, end in pairwise(borders):
            move = (gathered[begin // each] - begin // each) * each
            if begin < end:
                yield slice(begin + move, end + move)

    starts = np.cumsum([0, *own]).tolist()
    pieces, rows, first = list[Span](), 0, 0
    for its_range in ranges[index]:
        for (start, stop), common in zip(pairwise(starts), shared, strict=True):
            first = first if common else start
            begin, end = max(start, its_range.start), min(stop, its_range.stop)
            if begin < end:
                before = (*keys(first, first + common), *keys(start, begin))
                (its_keys,) = keys(begin, end)
                pieces.append(Span(slice(rows, rows + end - begin), before, its_keys))
                rows += end - begin
    return tuple(pieces)


def _piece_arrays(pieces: Sequence[Span]) -> dict[str, Any]:
    """Return the arrays of a `PackLayout` of pieces, by field."""
    queries = [piece.queries for piece in pieces]
    keys = [piece.queries + piece.before for piece in pieces]
    rows = [np.arange(r.start, r.stop) for piece in pieces for r in (*piece.shared, piece.keys)]
    return {
        "cu_queries": np.cumsum([0, *queries], dtype=np.int32),
        "cu_keys": np.cumsum([0, *keys], dtype=np.int32),
        "keys_K": np.concatenate(rows),
    }


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The exchange of rows for heads around attention; the layout is that of the whole pack."""

    shard: Shard

    def __call__(self, kernel: Kernel, pack: Attended) -> Tensor:
        """Compute attention; `pack` and the result have the rank's own rows."""
        query, key, value = self._swap_in(pack)
        sinks = pack.sinks
        if sinks is not None:
            sinks = sinks.unflatten(0, (self.shard.count, -1))[self.shard.index]
        inner = replace(pack, query=query, key=key, value=value, sinks=sinks)
        output_THD = kernel(inner)[0]
        blocks = output_THD.flatten(1).unflatten(0, (self.shard.count, -1))
        back: Tensor = _Swap.apply(blocks, self.shard)  # [ranks, own T, a rank's heads * D]
        own_TC = back.transpose(0, 1).flatten(1)
        own_THD: Tensor = own_TC.unflatten(1, (-1, output_THD.shape[2]))
        return own_THD[None]

    def _swap_in(self, pack: Attended) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all rows, for the rank's heads."""
        ranks = self.shard.count
        repeats = ranks // pack.key.shape[1]
        key, value = (
            x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (pack.key, pack.value)
        )
        parts = [
            x[0].unflatten(0, (ranks, -1)).permute(0, 2, 1, 3) for x in (pack.query, key, value)
        ]  # each [ranks, own T, heads of a rank, D]
        widths = [part.shape[2] * part.shape[3] for part in parts]
        whole: Tensor = _Swap.apply(torch.cat([part.flatten(2) for part in parts], 2), self.shard)
        columns = whole.flatten(0, 1).split(widths, 1)
        return tuple(
            own.unflatten(1, (-1, part.shape[3])).transpose(0, 1)[None]
            for own, part in zip(columns, parts, strict=True)
        )


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """The gathering of keys and values before attention; the layout has the rank's own pieces."""

    shard: Shard

    def __call__(self, kernel: Kernel, pack: Attended) -> Tensor:
        """Compute attention; `pack` and the result have the rank's own rows."""
        widths = [pack.key.shape[-1], pack.value.shape[-1]]
        own_TKD = torch.cat([pack.key[0], pack.value[0]], -1).transpose(0, 1)
        gathered: Tensor = _GatherKeys.apply(own_TKD, self.shard)
        key, value = (x.transpose(0, 1)[None] for x in gathered.split(widths, -1))
        return kernel(replace(pack, key=key, value=value))


class _Swap(torch.autograd.Function):
    """`Shard.swap`: a permutation of all ranks' numbers, whose adjoint is the same exchange."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.swap(sent.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.swap(grad.contiguous()), None


class _GatherKeys(torch.autograd.Function):
    """Gathers the rows of all ranks; the gradients of a row by all ranks are added up in fp32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.gather(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = ctx.shard.swap(grad.unflatten(0, (ctx.shard.count, -1)).contiguous())
        wide = torch.promote_types(grad.dtype, torch.float32)
        return parts.sum(0, dtype=wide).to(grad.dtype), None


class _Gather(torch.autograd.Function):
    """`PackShare.whole` of numbers of learned tokens."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: PackShare) -> Tensor:
        ctx.own_L = part.own_L
        gathered = part.shard.gather(pad(own, [0, part.most - len(own)]))
        return gathered.index_select(0, part.place_L)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.own_L), None


class _Sum(torch.autograd.Function):
    """`PackShare.whole` of a scalar."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: Shard) -> Tensor:
        return shard.add(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
