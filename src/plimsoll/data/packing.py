"""Samples -> micro-batches: no padding, no pack over the token budget, as many on every rank.

What is packed are groups of samples that stay together: single samples, or pairs. Two classic
algorithms do it. First-fit decreasing finds how few packs hold all groups (at most 11/9 of the
optimum plus one; Dósa 2007). Longest processing time first (Graham 1969) then spreads the groups
over that many packs, each to the cheapest pack with room; where its spread does not fit the
budget, the first-fit packs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import DataError
from plimsoll.records import Ints, Pack, Pair, Sample

Bins = list[list[int]]
"""Which groups each pack holds, by their numbers."""

EVEN_LENGTH = 24_576
"""The sequence length at which attention costs as much as all matrix products with weights.

Per token and layer, the weights of a decoder of width d cost about 24 d^2 operations and causal
attention over n tokens about 2 d n, equal at n = 12 d; this is the value for d = 2048."""


def sequence_cost(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimated work of sequences of so many tokens, in units of one token of a short sequence:
    n + n^2 / EVEN_LENGTH."""
    return tokens + tokens.astype(np.float64) ** 2 / EVEN_LENGTH


def pack(samples: Sequence[Sample], ranks: int, budget: int) -> list[list[Pack]]:
    """One list of packs per rank, equal in number; every sample is in exactly one of them.

    The k-th packs of all ranks run at the same time, so they are chosen to cost about the same.
    Where there are fewer samples than packs, fillers (see `Pack.samples_S`) make up the number.
    The result depends on nothing but the arguments.

    Raises DataError when a sample alone is over the budget.
    """
    return _pack(samples, [(i,) for i in range(len(samples))], ranks, budget)


def pack_pairs(pairs: Sequence[Pair], ranks: int, budget: int) -> list[list[Pack]]:
    """As `pack`, for pairs: both samples of a pair are in the same pack, one after the other.

    Pair i is samples 2 i (chosen) and 2 i + 1 (rejected) of the packs' `samples_S`.
    Raises DataError when a pair alone is over the budget.
    """
    samples = [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]
    return _pack(samples, [(2 * i, 2 * i + 1) for i in range(len(pairs))], ranks, budget)


def _pack(
    samples: Sequence[Sample], groups: Sequence[tuple[int, ...]], ranks: int, budget: int
) -> list[list[Pack]]:
    """Packs of whole groups; groups: which samples stay together, the same number in each."""
    assert samples and ranks > 0
    lengths_GS = np.array([[len(samples[i].tokens) for i in group] for group in groups])
    lengths, costs = lengths_GS.sum(1), sequence_cost(lengths_GS).sum(1)
    _check_budget(lengths, budget, "Sample" if len(groups[0]) == 1 else "Pair")
    by_rank = _deal(_bins(lengths, costs, ranks, budget), costs, ranks)
    return [
        [
            pack_one(samples, [i for group in members for i in groups[group]])
            if members
            else _filler(samples)
            for members in bins
        ]
        for bins in by_rank
    ]


def pack_one(samples: Sequence[Sample], indices: Sequence[int]) -> Pack:
    """The pack of the samples at `indices` of a batch, in that order (worked example: `Pack`)."""
    return _lay_out([samples[i] for i in indices], indices)


def _check_budget(lengths: Ints, budget: int, what: str) -> None:
    over = np.flatnonzero(lengths > budget)
    if len(over):
        longest = int(lengths.max())
        raise DataError(
            f"{what} {over[0]} of the batch has {lengths[over[0]]:,} tokens, over the budget of"
            f" {budget:,} tokens of one micro-batch ({len(over):,} like it, the longest of"
            f" {longest:,} tokens): set `batch.micro_batch_tokens` to at least {longest}, or"
            f" bound the samples (`data.max_tokens` with `data.over_long truncate`, and"
            f" `rollout.sampling.max_new_tokens` in RL)."
        )


def _bins(lengths: Ints, costs: NDArray[np.float64], ranks: int, budget: int) -> Bins:
    """Which groups share a pack: as few packs as first-fit needs, in a multiple of `ranks`.

    A pack without groups becomes a filler. lengths, costs: of each group."""
    longest_first = np.argsort(-lengths, kind="stable")
    fitted = _first_fit(longest_first, lengths, budget)
    count = -(-len(fitted) // ranks) * ranks
    spread = _spread(longest_first, lengths, costs, count, budget)
    return spread or fitted + [[] for _ in range(count - len(fitted))]


def _first_fit(order: Ints, lengths: Ints, budget: int) -> Bins:
    """Each group goes into the first bin with room for it; a bin is opened when none has."""
    room = np.full(len(order), budget, dtype=np.int64)
    bins: Bins = []
    for i in order.tolist():
        place = int(np.argmax(room >= lengths[i]))
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def _spread(
    order: Ints, lengths: Ints, costs: NDArray[np.float64], count: int, budget: int
) -> Bins | None:
    """Each group goes into the cheapest of `count` bins that has room; None if none has."""
    bins: Bins = [[] for _ in range(count)]
    room = np.full(count, budget, dtype=np.int64)
    load = np.zeros(count)
    for i in order.tolist():
        place = int(np.argmin(np.where(room >= lengths[i], load, np.inf)))
        if room[place] < lengths[i]:
            return None
        bins[place].append(i)
        room[place] -= lengths[i]
        load[place] += costs[i]
    return bins


def _deal(bins: Bins, costs: NDArray[np.float64], ranks: int) -> list[Bins]:
    """Deal the bins out in rounds of like cost; in each, the dearest to the rank with least."""
    cost = [float(costs[members].sum()) for members in bins]
    dearest_first = sorted(range(len(bins)), key=lambda b: -cost[b])
    by_rank: list[Bins] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for start in range(0, len(bins), ranks):
        least_first = sorted(range(ranks), key=lambda rank: load[rank])
        for rank, b in zip(least_first, dearest_first[start : start + ranks], strict=True):
            by_rank[rank].append(bins[b])
            load[rank] += cost[b]
    return by_rank


def _filler(samples: Sequence[Sample]) -> Pack:
    shortest = min(samples, key=lambda sample: len(sample.tokens))
    return _lay_out([Sample(shortest.tokens, np.zeros_like(shortest.learned))], [-1])


def _lay_out(sequences: Sequence[Sample], numbers: Sequence[int]) -> Pack:
    tokens_T = np.concatenate([sequence.tokens for sequence in sequences])
    learned_at = np.flatnonzero(np.concatenate([sequence.learned for sequence in sequences]))
    return Pack(
        tokens_T=tokens_T,
        positions_T=np.concatenate([np.arange(len(s.tokens), dtype=np.int64) for s in sequences]),
        cu_seqlens=_cumulative([len(sequence.tokens) for sequence in sequences]),
        predictor_L=learned_at - 1,
        targets_L=tokens_T[learned_at],
        cu_learned=_cumulative([int(sequence.learned.sum()) for sequence in sequences]),
        samples_S=np.array(numbers, dtype=np.int64),
    )


def _cumulative(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)
