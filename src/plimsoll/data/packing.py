"""Pack samples into micro-batches: no padding, a token budget, equally many on each rank.

Groups of samples stay together: single samples, pairs, or responses to one prompt. The samples of a
group may begin alike: the pack then holds their prompt once (see `Pack.shared_S`).

Two classic algorithms do this. First-fit decreasing finds how few packs hold all groups (at most
11/9 of the optimum plus one; Dósa 2007). Longest processing time first (Graham 1969) then spreads
the groups over that many packs, each to the cheapest pack with room. If its spread does not fit the
budget, the first-fit packs are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import DataError
from plimsoll.records import ExpertNumbers, Ints, Pack, Pair, Sample, leaders, unrouted_number
from plimsoll.run.numbers import plural

Bins = list[list[int]]
"""The numbers of the groups in each pack."""

EVEN_LENGTH = 24_576
"""The sequence length at which attention costs as much as all matrix products with weights.

Per token and layer, the weights of a decoder of width d cost about 24 d^2 operations and causal
attention over n tokens about 2 d n. Both are equal at n = 12 d; this is the value for d = 2048.
"""


def sequence_cost(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate the work of sequences with these numbers of tokens: n + n^2 / EVEN_LENGTH.

    The unit is one token of a short sequence.
    """
    return tokens + tokens.astype(np.float64) ** 2 / EVEN_LENGTH


def pack(samples: Sequence[Sample], ranks: int, budget: int) -> list[list[Pack]]:
    """Return a list of packs for each rank, all equally long. Each sample is in exactly one pack.

    The k-th packs of all ranks run at the same time, so they cost about the same. If there are
    fewer samples than packs, fillers (see `Pack.samples_S`) make up the number. The result depends
    on nothing but the arguments.

    Args:
        samples: the samples to pack.
        ranks: the number of ranks.
        budget: the most tokens of one pack.

    Raises:
        DataError: a sample alone is over the budget.
    """
    return _pack(samples, [_Bunch([i], [0]) for i in range(len(samples))], ranks, budget)


def pack_pairs(
    pairs: Sequence[Pair], ranks: int, budget: int, *, share_prompts: bool = False
) -> list[list[Pack]]:
    """Pack pairs as `pack` packs samples: both samples of a pair are adjacent in one pack.

    Pair i is samples 2 i (chosen) and 2 i + 1 (rejected) of the packs' `samples_S`.

    Args:
        pairs: the pairs to pack.
        ranks: the number of ranks.
        budget: the most tokens of one pack.
        share_prompts: whether a pack holds the prompt of a pair once, and the budget counts it
            once.

    Raises:
        DataError: a pair alone is over the budget.
    """
    samples = [sample for pair in pairs for sample in pair.samples]
    groups = [
        _Bunch([2 * i, 2 * i + 1], shared_tokens(pair.samples) if share_prompts else [0, 0])
        for i, pair in enumerate(pairs)
    ]
    return _pack(samples, groups, ranks, budget, "Pair")


def pack_groups(
    samples: Sequence[Sample], group_S: Sequence[int] | Ints, ranks: int, budget: int
) -> list[list[Pack]]:
    """Pack samples as `pack` does, with the prompt of each group once.

    The samples of a group stay together. A group with more tokens than the budget, or than an equal
    share of all tokens for each rank, is divided into parts, each with the prompt.

    Args:
        samples: the samples to pack.
        group_S: the group of each sample. The samples of a group begin with the same prompt.
        ranks: the number of ranks.
        budget: the most tokens of one pack.

    Raises:
        DataError: a sample alone is over the budget.
    """
    lengths = [len(sample.tokens) for sample in samples]
    most = min(budget, max(-(-sum(lengths) // ranks), *lengths))
    members: dict[int, list[int]] = {}
    for i, group in enumerate(group_S):
        members.setdefault(int(group), []).append(i)
    groups = [part for numbers in members.values() for part in _divide(samples, numbers, most)]
    return _pack(samples, groups, ranks, budget)


def _divide(samples: Sequence[Sample], members: Sequence[int], most: int) -> Iterator[_Bunch]:
    """Divide a group's samples, in order, into parts of at most `most` tokens."""
    part, shared, tokens, leader = list[int](), list[int](), 0, samples[members[0]]
    for i in members:
        sample = samples[i]
        common = _common_tokens(leader, sample) if part else 0
        if part and tokens + len(sample.tokens) - common > most:
            yield _Bunch(part, shared)
            part, shared, tokens, common = [], [], 0, 0
        leader = leader if common else sample
        part.append(i)
        shared.append(common)
        tokens += len(sample.tokens) - common
    yield _Bunch(part, shared)


@dataclass(frozen=True)
class _Bunch:
    """Samples that stay together."""

    members: Sequence[int]
    """The numbers of the samples."""
    shared: Sequence[int]
    """The tokens that each sample shares with an earlier one; see `shared_tokens`."""


def shared_tokens(group: Sequence[Sample]) -> list[int]:
    """Return how many tokens at the beginning of each sample the pack need not repeat.

    These tokens equal the beginning of the nearest earlier sample that itself shares none (see
    `Pack.shared_S`). The sample learns none of them, and both samples have at least one token after
    them.
    """
    leader, shared = group[0], [0]
    for sample in group[1:]:
        shared.append(_common_tokens(leader, sample))
        leader = sample if shared[-1] == 0 else leader
    return shared


def _common_tokens(first: Sample, second: Sample) -> int:
    most = min(len(first.tokens), len(second.tokens)) - 1
    differ = first.tokens[:most] != second.tokens[:most]
    ends = differ | second.loss_mask[:most]
    return int(ends.argmax()) if ends.any() else most


def _pack(
    samples: Sequence[Sample],
    groups: Sequence[_Bunch],
    ranks: int,
    budget: int,
    group_name: str = "Sample",
) -> list[list[Pack]]:
    """Return packs of undivided groups, a list per rank. Errors call a group `group_name`."""
    assert samples and ranks > 0
    samples = _alike_routed(samples)
    lengths, costs = _sizes(samples, groups)
    _check_budget(lengths, budget, group_name)

    def pack_groups_of(numbers: Sequence[int]) -> Pack:
        if not numbers:
            return _filler(samples)
        members = [i for group in numbers for i in groups[group].members]
        shared = [n for group in numbers for n in groups[group].shared]
        return pack_one(samples, members, np.array(shared))

    by_rank = _deal(_bins(lengths, costs, ranks, budget), costs, ranks)
    return [list(map(pack_groups_of, bins)) for bins in by_rank]


def _alike_routed(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples; if any has experts, each has them, of no token where it had none.

    So all packs of a step have experts, or none has: ranks treat them alike.
    """
    like = next((sample.routing for sample in samples if sample.routing is not None), None)
    if like is None:
        return samples
    return [s if s.routing is not None else replace(s, routing=like[:0]) for s in samples]


def _sizes(samples: Sequence[Sample], groups: Sequence[_Bunch]) -> tuple[Ints, NDArray[np.float64]]:
    """Return the tokens and the cost of each group."""
    whole = np.array([len(samples[i].tokens) for group in groups for i in group.members])
    shared = np.array([n for group in groups for n in group.shared])
    starts = np.cumsum([0, *(len(group.members) for group in groups[:-1])])
    costs = sequence_cost(whole) - sequence_cost(shared)
    return np.add.reduceat(whole - shared, starts), np.add.reduceat(costs, starts)


def pack_one(
    samples: Sequence[Sample], indices: Sequence[int] | Ints, shared_S: Ints | None = None
) -> Pack:
    """Return the pack of the samples at `indices` of a batch, in that order (example: `Pack`).

    Args:
        samples: the samples to pack.
        indices: the numbers of the samples.
        shared_S: as in the pack; None if the samples share nothing.
    """
    if shared_S is None:
        shared_S = np.zeros(len(indices), dtype=np.int64)
    return _lay_out([samples[i] for i in indices], indices, shared_S)


def split_packs(by_rank: Sequence[Sequence[Pack]], budget: int, unit: int) -> list[list[Pack]]:
    """Split every pack with more tokens than the budget; the sequences keep rank and order.

    The parts stand where the pack stood. Where another rank has more parts, fillers make up the
    number. A pack within the budget stays as it is, and so does a single row over the budget.

    Args:
        by_rank: the packs of each rank, equally many.
        budget: the most tokens of a part.
        unit: the sequences that stay together: 2 for pairs, else 1.
    """
    split: list[list[Pack]] = [[] for _ in by_rank]
    for packs in zip(*by_rank, strict=True):
        parts = [_split(pack, budget, unit) for pack in packs]
        most = max(map(len, parts))
        for rank_packs, own in zip(split, parts, strict=True):
            rank_packs += own + [_filler(_samples(own[0]))] * (most - len(own))
    return split


def _split(pack: Pack, budget: int, unit: int) -> list[Pack]:
    """Split a pack into parts of as many rows as the budget allows, at least one."""
    if pack.tokens <= budget or len(pack.samples_S) <= unit:
        return [pack]
    samples, parts, first = _samples(pack), list[Pack](), 0
    for end in range(unit, len(samples) + unit, unit):
        last = end >= len(samples)
        if last or _part(pack, samples, first, end + unit).tokens > budget:
            parts.append(_part(pack, samples, first, end))
            first = end
    return parts


def _part(pack: Pack, samples: Sequence[Sample], first: int, end: int) -> Pack:
    """Return the pack of the sequences from `first` to before `end`.

    Sequences share what they shared, as far as their leader is in the part.
    """
    groups: dict[int, list[Sample]] = {}
    for leader, sample in zip(leaders(pack.shared_S)[first:end], samples[first:end], strict=True):
        groups.setdefault(int(leader), []).append(sample)
    shared = [n for group in groups.values() for n in shared_tokens(group)]
    return _lay_out(samples[first:end], pack.samples_S[first:end], np.array(shared))


def _samples(pack: Pack) -> list[Sample]:
    """Return the whole sequences of a pack."""
    samples: list[Sample] = []
    learned_T = pack.learned_T
    for i, leader in enumerate(leaders(pack.shared_S)):
        own, shared = slice(*pack.cu_seqlens[i : i + 2]), int(pack.shared_S[i])
        first = samples[leader].tokens[:shared] if shared else pack.tokens_T[:0]
        tokens = np.concatenate([first, pack.tokens_T[own]])
        loss_mask = np.concatenate([np.zeros(shared, np.bool_), learned_T[own]])
        routing = None
        if pack.routing_T is not None:
            begun = samples[leader].routing if shared else pack.routing_T[:0]
            assert begun is not None
            routing = np.concatenate([begun[:shared], pack.routing_T[own]])
        samples.append(Sample(tokens, loss_mask, routing))
    return samples


def _check_budget(lengths: Ints, budget: int, group_name: str) -> None:
    over = np.flatnonzero(lengths > budget)
    if len(over):
        longest = int(lengths.max())
        raise DataError(
            f"{group_name} {over[0]} of the batch has {lengths[over[0]]:,} tokens, over the budget"
            f" of {plural(budget, 'token')} of one micro-batch ({len(over):,} like it, the longest"
            f" of {longest:,} tokens): set `batch.micro_batch_tokens` to at least {longest} (over"
            f" `cluster.sequence_parallel`, where ranks share packs), or"
            f" bound the samples (`data.max_tokens` with `data.over_long truncate`, and"
            f" `rollout.sampling.max_new_tokens` in RL)."
        )


def _bins(lengths: Ints, costs: NDArray[np.float64], ranks: int, budget: int) -> Bins:
    """Return the group numbers of each pack, as few packs as first-fit needs.

    The number of packs is rounded up to a multiple of `ranks`. A pack without groups becomes a
    filler. `lengths` and `costs` have one value per group.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    fitted = _first_fit(longest_first, lengths, budget)
    count = -(-len(fitted) // ranks) * ranks
    spread = _spread(longest_first, lengths, costs, count, budget)
    return spread or fitted + [[] for _ in range(count - len(fitted))]


def _first_fit(order: Ints, lengths: Ints, budget: int) -> Bins:
    """Return bins, each group in the first bin with room for it. If none has room, open a bin."""
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
    """Return `count` bins, each group in the cheapest bin with room; None if none has room."""
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
    """Return the bins of each rank, dealt out in rounds of bins of similar cost.

    In each round the rank with the least load gets the dearest bin.
    """
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
    routing = None if shortest.routing is None else shortest.routing[:0]
    filler = Sample(shortest.tokens, np.zeros_like(shortest.loss_mask), routing)
    return _lay_out([filler], [-1], np.zeros(1, dtype=np.int64))


def _lay_out(sequences: Sequence[Sample], numbers: Sequence[int] | Ints, shared_S: Ints) -> Pack:
    parts = list(zip(sequences, shared_S.tolist(), strict=True))
    tokens = [sequence.tokens[shared:] for sequence, shared in parts]
    loss_mask = [sequence.loss_mask[shared:] for sequence, shared in parts]
    return Pack(
        tokens_T=np.concatenate(tokens, dtype=np.int32),
        learned_bits=np.packbits(np.concatenate(loss_mask)),
        cu_seqlens=_cumulative([len(kept) for kept in tokens]),
        shared_S=shared_S,
        cu_loss_tokens=_cumulative([int(kept.sum()) for kept in loss_mask]),
        samples_S=np.array(numbers, dtype=np.int64),
        routing_T=_lay_out_routing(parts),
    )


def _lay_out_routing(parts: Sequence[tuple[Sample, int]]) -> ExpertNumbers | None:
    """Return the experts of a pack's tokens, given its samples and how much each of them shares."""
    like = next((sample.routing for sample, _ in parts if sample.routing is not None), None)
    if like is None:
        return None
    none = unrouted_number(like.itemsize)
    rows: list[ExpertNumbers] = []
    for sample, shared in parts:
        given = like[:0] if sample.routing is None else sample.routing[shared:]
        missing = len(sample.tokens) - shared - len(given)
        rows += [given, np.full((missing, *like.shape[1:]), none, like.dtype)]
    return np.concatenate(rows)


def _cumulative(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)
