"""Samples -> micro-batches: no padding, no pack over the token budget, as many on every rank.

What is packed are groups of samples that stay together: single samples, pairs, or responses to one
prompt. The samples of a group may share how they begin: the pack then holds their prompt once (see
`Pack.shared_S`).

Two classic algorithms do it. First-fit decreasing finds how few packs hold all groups (at most 11/9
of the optimum plus one; Dósa 2007). Longest processing time first (Graham 1969) then spreads the
groups over that many packs, each to the cheapest pack with room; where its spread does not fit the
budget, the first-fit packs are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import DataError
from plimsoll.records import Ints, Pack, Pair, Sample, leaders
from plimsoll.run.counting import counted

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
    return _pack(samples, [_Group([i], [0]) for i in range(len(samples))], ranks, budget)


def pack_pairs(
    pairs: Sequence[Pair], ranks: int, budget: int, *, share_prompts: bool = False
) -> list[list[Pack]]:
    """As `pack`, for pairs: both samples of a pair are in the same pack, one after the other.

    Pair i is samples 2 i (chosen) and 2 i + 1 (rejected) of the packs' `samples_S`.
    share_prompts: the pack holds a pair's prompt once, and the budget counts it once.
    Raises DataError when a pair alone is over the budget.
    """
    samples = [sample for pair in pairs for sample in pair.samples]
    groups = [
        _Group([2 * i, 2 * i + 1], shared_tokens(pair.samples) if share_prompts else [0, 0])
        for i, pair in enumerate(pairs)
    ]
    return _pack(samples, groups, ranks, budget, "Pair")


def pack_groups(
    samples: Sequence[Sample], group_S: Sequence[int] | Ints, ranks: int, budget: int
) -> list[list[Pack]]:
    """As `pack`, for samples of which some begin alike: those of the same number in `group_S`. They
    stay together, and their pack holds their prompt once. A group that is over the budget, or over
    a rank's share of all tokens, is divided into parts, each with the prompt.

    Raises DataError when a sample alone is over the budget.
    """
    lengths = [len(sample.tokens) for sample in samples]
    most = min(budget, max(-(-sum(lengths) // ranks), *lengths))
    members: dict[int, list[int]] = {}
    for i, group in enumerate(group_S):
        members.setdefault(int(group), []).append(i)
    groups = [part for own in members.values() for part in _parts(samples, own, most)]
    return _pack(samples, groups, ranks, budget)


def _parts(samples: Sequence[Sample], members: Sequence[int], most: int) -> Iterator[_Group]:
    """A group's samples in as few parts of at most so many tokens as their order gives."""
    part: list[int] = []
    for i in members:
        longer = [*part, i]
        shared = shared_tokens([samples[j] for j in longer])
        tokens = sum(len(samples[j].tokens) for j in longer) - sum(shared)
        if part and tokens > most:
            yield _Group(part, shared[:-1])
            part = []
        part = [*part, i]
    yield _Group(part, shared_tokens([samples[j] for j in part]))


@dataclass(frozen=True)
class _Group:
    """Samples that stay together. members: their numbers. shared: see `shared_tokens`."""

    members: Sequence[int]
    shared: Sequence[int]


def shared_tokens(group: Sequence[Sample]) -> list[int]:
    """How many tokens each sample of a group begins with that need not be in the pack again,
    because the nearest sample before that shares none begins with them (see `Pack.shared_S`).

    The sample itself learns none of them, and both have at least one token after them.
    """
    leader, found = group[0], [0]
    for sample in group[1:]:
        found.append(_common_tokens(leader, sample))
        leader = sample if found[-1] == 0 else leader
    return found


def _common_tokens(one: Sample, other: Sample) -> int:
    most = min(len(one.tokens), len(other.tokens)) - 1
    differ = one.tokens[:most] != other.tokens[:most]
    return int(np.argmax([*(differ | other.loss_mask[:most]), True]))


def _pack(
    samples: Sequence[Sample],
    groups: Sequence[_Group],
    ranks: int,
    budget: int,
    what: str = "Sample",
) -> list[list[Pack]]:
    """Packs of whole groups. what: a group is called."""
    assert samples and ranks > 0
    lengths, costs = _sizes(samples, groups)
    _check_budget(lengths, budget, what)

    def packed(own: Sequence[int]) -> Pack:
        if not own:
            return _filler(samples)
        members = [i for group in own for i in groups[group].members]
        shared = [n for group in own for n in groups[group].shared]
        return pack_one(samples, members, np.array(shared))

    by_rank = _deal(_bins(lengths, costs, ranks, budget), costs, ranks)
    return [list(map(packed, bins)) for bins in by_rank]


def _sizes(samples: Sequence[Sample], groups: Sequence[_Group]) -> tuple[Ints, NDArray[np.float64]]:
    """The tokens and the cost of each group."""
    whole = np.array([len(samples[i].tokens) for group in groups for i in group.members])
    shared = np.array([n for group in groups for n in group.shared])
    starts = np.cumsum([0, *(len(group.members) for group in groups[:-1])])
    costs = sequence_cost(whole) - sequence_cost(shared)
    return np.add.reduceat(whole - shared, starts), np.add.reduceat(costs, starts)


def pack_one(
    samples: Sequence[Sample], indices: Sequence[int] | Ints, shared_S: Ints | None = None
) -> Pack:
    """The pack of the samples at `indices` of a batch, in that order (worked example: `Pack`).

    shared_S: as in the pack; None: they share nothing.
    """
    if shared_S is None:
        shared_S = np.zeros(len(indices), dtype=np.int64)
    return _lay_out([samples[i] for i in indices], indices, shared_S)


def _check_budget(lengths: Ints, budget: int, what: str) -> None:
    over = np.flatnonzero(lengths > budget)
    if len(over):
        longest = int(lengths.max())
        raise DataError(
            f"{what} {over[0]} of the batch has {lengths[over[0]]:,} tokens, over the budget of"
            f" {counted(budget, 'token')} of one micro-batch ({len(over):,} like it, the longest of"
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
        place = int(np.argmax(room[: len(bins) + 1] >= lengths[i]))
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
    filler = Sample(shortest.tokens, np.zeros_like(shortest.loss_mask))
    return _lay_out([filler], [-1], np.zeros(1, dtype=np.int64))


def _lay_out(sequences: Sequence[Sample], numbers: Sequence[int] | Ints, shared_S: Ints) -> Pack:
    parts = list(zip(sequences, shared_S.tolist(), strict=True))
    tokens = [sequence.tokens[shared:] for sequence, shared in parts]
    loss_mask = [sequence.loss_mask[shared:] for sequence, shared in parts]
    tokens_T = np.concatenate(tokens, dtype=np.int64)
    loss_at = np.flatnonzero(np.concatenate(loss_mask))
    cu_seqlens = _cumulative([len(own) for own in tokens])
    return Pack(
        tokens_T=tokens_T,
        positions_T=np.concatenate([np.arange(shared, len(s.tokens)) for s, shared in parts]),
        cu_seqlens=cu_seqlens,
        shared_S=shared_S,
        predictor_L=_before(cu_seqlens, shared_S)[loss_at],
        targets_L=tokens_T[loss_at],
        cu_loss_tokens=_cumulative([int(own.sum()) for own in loss_mask]),
        samples_S=np.array(numbers, dtype=np.int64),
    )


def _before(cu_seqlens: NDArray[np.int32], shared_S: Ints) -> Ints:
    """Which token of the pack comes before each token; that before a pack's first is of no use."""
    starts_S = cu_seqlens[:-1]
    before_T = np.arange(-1, cu_seqlens[-1] - 1)
    before_T[starts_S] = starts_S[leaders(shared_S)] + shared_S - 1
    return before_T


def _cumulative(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)
