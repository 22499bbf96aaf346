"""Packing: the worked layout, the budget, equal numbers, balance, fillers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.data.packing import (
    EVEN_LENGTH,
    pack,
    pack_one,
    pack_pairs,
    sequence_cost,
    shared_tokens,
)
from plimsoll.errors import DataError
from plimsoll.records import ADVANTAGES, Pack, Pair, Sample, from_packed


def sample(length: int, first: int = 0, loss_mask: int | None = None) -> Sample:
    """Return the tokens first, first + 1, ...; the last `learned` of them are learned."""
    marks = np.zeros(length, dtype=np.bool_)
    marks[length - (length - 1 if loss_mask is None else loss_mask) :] = True
    return Sample(np.arange(first, first + length, dtype=np.int64), marks)


def lengths(packs: list[list[Pack]]) -> list[list[list[int]]]:
    return [[np.diff(pack.cu_seqlens).tolist() for pack in rank] for rank in packs]


def test_the_worked_example_of_the_pack_record() -> None:
    made = pack_one([sample(3, 10), sample(9), sample(2, 20)], [0, 2])
    assert made.tokens_T.tolist() == [10, 11, 12, 20, 21]
    assert made.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert made.cu_seqlens.tolist() == [0, 3, 5] and made.cu_seqlens.dtype == np.int32
    assert made.predictor_L.tolist() == [0, 1, 3]
    assert made.targets_L.tolist() == [11, 12, 21]
    assert made.cu_loss_tokens.tolist() == [0, 2, 3] and made.cu_loss_tokens.dtype == np.int32
    assert made.samples_S.tolist() == [0, 2]


def test_only_learned_tokens_are_targets() -> None:
    made = pack_one([sample(4, 10, loss_mask=1), sample(3, 20, loss_mask=0)], [0, 1])
    assert made.targets_L.tolist() == [13]
    assert made.predictor_L.tolist() == [2]
    assert made.cu_loss_tokens.tolist() == [0, 1, 1]


def test_cost_is_tokens_plus_attention() -> None:
    cost = sequence_cost(np.array([0, 1024, EVEN_LENGTH]))
    assert cost.tolist() == [0.0, 1024 + 1024**2 / 24_576, 2.0 * EVEN_LENGTH]


def test_work_is_balanced_by_longest_first() -> None:
    """8 5 and 7 6 have 13 tokens each, and 8 5 costs more attention. So the 4 joins 7 6."""
    packs = pack([sample(n) for n in (4, 5, 6, 7, 8)], ranks=2, budget=100)
    assert lengths(packs) == [[[7, 6, 4]], [[8, 5]]]


def test_rounds_cost_alike_and_ranks_take_turns() -> None:
    """Packs of 9, 8, 7, 6 tokens: 9 beside 8, then 7 beside 6, which goes to the 9's rank."""
    packs = pack([sample(n) for n in (6, 7, 8, 9)], ranks=2, budget=10)
    assert lengths(packs) == [[[9], [6]], [[8], [7]]]


def test_first_fit_is_kept_where_the_even_spread_does_not_fit() -> None:
    """The even spread gives 5 3 | 4 3, with no room for the last 3 within 9 tokens.

    First-fit gives 5 4 | 3 3 3.
    """
    packs = pack([sample(n) for n in (5, 4, 3, 3, 3)], ranks=1, budget=9)
    assert sorted(lengths(packs)[0]) == [[3, 3, 3], [5, 4]]


def test_fillers_make_up_the_number() -> None:
    packs = pack([sample(5, 50), sample(3, 30)], ranks=4, budget=8)
    fillers = [rank[0] for rank in packs if rank[0].samples_S.tolist() == [-1]]
    assert [len(rank) for rank in packs] == [1, 1, 1, 1]
    assert len(fillers) == 2
    for filler in fillers:
        assert filler.tokens_T.tolist() == [30, 31, 32]
        assert filler.loss_tokens == 0 and filler.cu_loss_tokens.tolist() == [0, 0]


def test_a_sample_over_the_budget_is_refused_with_the_way_out() -> None:
    with pytest.raises(DataError) as refused:
        pack([sample(3), sample(12), sample(20)], ranks=1, budget=10)
    message = str(refused.value)
    assert "Sample 1 of the batch has 12 tokens" in message
    assert "micro_batch_tokens` to at least 20" in message


def test_a_sample_of_exactly_the_budget_fits() -> None:
    assert lengths(pack([sample(10)], ranks=1, budget=10)) == [[[10]]]


SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 5), st.integers(64, 200))
@example([64] * 7, 3, 64)
@example([5, 4, 3, 3, 3], 3, 64)
def test_every_sample_is_in_one_pack_within_the_budget(
    sizes: list[int], ranks: int, budget: int
) -> None:
    samples = [sample(n, first=100 * i) for i, n in enumerate(sizes)]
    packs = pack(samples, ranks, budget)
    flat = [pack for rank in packs for pack in rank]
    placed = [i for pack in flat for i in pack.samples_S.tolist() if i >= 0]

    assert len(packs) == ranks and len({len(rank) for rank in packs}) == 1
    assert all(0 < pack.tokens <= budget for pack in flat)
    assert sorted(placed) == list(range(len(samples)))
    for made in flat:
        for i, start, end in zip(
            made.samples_S, made.cu_seqlens[:-1], made.cu_seqlens[1:], strict=True
        ):
            if i >= 0:
                assert made.tokens_T[start:end].tolist() == samples[i].tokens.tolist()
    fillers = sum(-1 in pack.samples_S for pack in flat)
    assert fillers == max(0, len(flat) - len(samples))


@given(SIZES, st.integers(1, 4))
def test_the_number_of_packs_is_near_the_least_possible(sizes: list[int], ranks: int) -> None:
    """Any two packs of first-fit hold more than the budget together; else they would be one."""
    packs = pack([sample(n) for n in sizes], ranks, budget=64)
    most = -(-2 * sum(sizes) // 64)
    assert len(packs[0]) <= max(1, -(-most // ranks))


@given(SIZES, st.integers(1, 4))
def test_ranks_cost_about_the_same(sizes: list[int], ranks: int) -> None:
    """If there is room for everything, no two ranks differ by more than the costliest sample."""
    packs = pack([sample(n) for n in sizes], ranks, budget=10_000)
    cost = [sequence_cost(np.diff(rank[0].cu_seqlens)).sum() for rank in packs]
    assert max(cost) - min(cost) <= sequence_cost(np.array([max(sizes)]))[0] + 1e-9


@given(SIZES, st.integers(1, 4))
def test_packing_and_unpacking_values_is_the_identity(sizes: list[int], ranks: int) -> None:
    samples = [sample(n) for n in sizes]
    values = [np.arange(n - 1, dtype=np.float32) + 1000 * i for i, n in enumerate(sizes)]
    flat = [pack for rank in pack(samples, ranks, budget=64) for pack in rank]
    back = from_packed(flat, [ADVANTAGES.cut(values, pack) for pack in flat])
    assert [array.tolist() for array in back] == [array.tolist() for array in values]


def test_packing_is_deterministic() -> None:
    samples = [sample(1 + (7 * i) % 13) for i in range(50)]
    one, two = pack(samples, 3, 32), pack(samples, 3, 32)
    assert [[p.samples_S.tolist() for p in rank] for rank in one] == [
        [p.samples_S.tolist() for p in rank] for rank in two
    ]


def test_pairs_are_balanced_as_units() -> None:
    """Pairs of 9, 8, 7 and 6 tokens, with room for two small ones in a pack, as single samples."""
    pairs = [Pair(sample(n - 2), sample(2)) for n in (6, 7, 8, 9)]
    packs = pack_pairs(pairs, ranks=2, budget=10)
    assert lengths(packs) == [[[7, 2], [4, 2]], [[6, 2], [5, 2]]]
    assert [[p.samples_S.tolist() for p in rank] for rank in packs] == [
        [[6, 7], [0, 1]],
        [[4, 5], [2, 3]],
    ]


def test_a_pair_over_the_budget_is_refused_with_the_way_out() -> None:
    with pytest.raises(DataError) as refused:
        pack_pairs([Pair(sample(3), sample(4)), Pair(sample(6), sample(5))], ranks=1, budget=10)
    message = str(refused.value)
    assert "Pair 1 of the batch has 11 tokens" in message
    assert "micro_batch_tokens` to at least 11" in message


PAIR_SIZES = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 32)), min_size=1, max_size=30)


@given(PAIR_SIZES, st.integers(1, 5), st.integers(64, 200))
@example([(32, 32)] * 5, 4, 64)
def test_both_sequences_of_a_pair_share_a_pack(
    sizes: list[tuple[int, int]], ranks: int, budget: int
) -> None:
    pairs = [
        Pair(sample(a, first=200 * i), sample(b, first=200 * i + 100))
        for i, (a, b) in enumerate(sizes)
    ]
    packs = pack_pairs(pairs, ranks, budget)
    flat = [pack for rank in packs for pack in rank]
    assert len(packs) == ranks and len({len(rank) for rank in packs}) == 1
    assert all(0 < pack.tokens <= budget for pack in flat)
    real = [pack for pack in flat if -1 not in pack.samples_S]
    assert all(pack.loss_tokens == 0 for pack in flat if -1 in pack.samples_S)
    placed = np.concatenate([pack.samples_S.reshape(-1, 2) for pack in real])
    assert sorted(placed[:, 0].tolist()) == list(range(0, 2 * len(pairs), 2))
    assert (placed[:, 1] == placed[:, 0] + 1).all()
    for made in real:
        starts = made.tokens_T[made.cu_seqlens[:-1]].tolist()
        assert starts == [100 * int(i) for i in made.samples_S]


@given(PAIR_SIZES, st.integers(1, 4))
def test_ranks_cost_about_the_same_in_pairs(sizes: list[tuple[int, int]], ranks: int) -> None:
    """If there is room for everything, no two ranks differ by more than the costliest pair."""
    packs = pack_pairs([Pair(sample(a), sample(b)) for a, b in sizes], ranks, budget=10_000)
    cost = [
        sequence_cost(np.diff(rank[0].cu_seqlens)).sum() if rank[0].samples_S[0] >= 0 else 0.0
        for rank in packs
    ]
    dearest = max(sequence_cost(np.array(pair)).sum() for pair in sizes)
    assert max(cost) - min(cost) <= dearest + 1e-9


def prompted(prompt: list[int], response: list[int]) -> Sample:
    """Return a response that is learned, after a prompt that is not."""
    tokens = np.array(prompt + response, dtype=np.int64)
    return Sample(tokens, np.arange(len(tokens)) >= max(1, len(prompt)))


def test_the_worked_example_of_a_shared_beginning() -> None:
    pair = Pair(prompted([10, 11], [12]), prompted([10, 11], [15]))
    made = pack_pairs([pair], ranks=1, budget=4, share_prompts=True)[0][0]
    assert made.tokens_T.tolist() == [10, 11, 12, 15]
    assert made.positions_T.tolist() == [0, 1, 2, 2]
    assert made.cu_seqlens.tolist() == [0, 3, 4] and made.shared_S.tolist() == [0, 2]
    assert made.predictor_L.tolist() == [1, 1]
    assert made.targets_L.tolist() == [12, 15] and made.cu_loss_tokens.tolist() == [0, 1, 2]


def test_what_a_group_shares() -> None:
    """The same prompt; half of it; another prompt, which a fourth response continues."""
    group = [
        prompted([1, 2, 3, 4], [5, 6]),
        prompted([1, 2, 3, 4], [7]),
        prompted([1, 2, 8, 9], [5, 6]),
        prompted([3, 4], [5, 6]),
        prompted([3, 4], [7]),
    ]
    assert shared_tokens(group) == [0, 4, 2, 0, 2]


def test_learned_tokens_and_whole_samples_are_not_shared() -> None:
    """Responses that begin alike are computed twice. One token of a sample is always its own."""
    assert shared_tokens([prompted([1, 2], [3, 4]), prompted([1, 2], [3, 5])]) == [0, 2]
    unlearned = Sample(np.array([1, 2, 3]), np.zeros(3, dtype=np.bool_))
    assert shared_tokens([unlearned, unlearned]) == [0, 2]
    assert shared_tokens([sample(1), sample(1)]) == [0, 0]


def test_a_shared_prompt_costs_once() -> None:
    """A third pair joins the pair with a prompt of 4,000 tokens, not the pair of 4,400 in all."""
    prompt = list(range(4_000))
    pairs = [
        Pair(sample(2_200, first=5_000), sample(2_200, first=10_000)),
        Pair(prompted(prompt, [1]), prompted(prompt, [2])),
        Pair(sample(50, first=5_000), sample(50, first=10_000)),
    ]
    packs = pack_pairs(pairs, ranks=2, budget=10_000, share_prompts=True)
    assert [[p.samples_S.tolist() for p in rank] for rank in packs] == [[[0, 1]], [[2, 3, 4, 5]]]


RESPONSES = st.lists(st.integers(0, 3), min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(st.integers(0, 30), RESPONSES, RESPONSES), min_size=1, max_size=20)


@given(PAIRS, st.integers(1, 4), st.integers(64, 200))
@example([(3, [1], [1])], 1, 64)
@example([(0, [1, 2], [1, 3])], 2, 64)
def test_sharing_prompts_loses_and_invents_nothing(
    drawn: list[tuple[int, list[int], list[int]]], ranks: int, budget: int
) -> None:
    """Each pack gives its samples back: tokens, positions, targets, and the token before each."""
    prompts = [list(range(100 * i, 100 * i + n)) for i, (n, _, _) in enumerate(drawn)]
    pairs = [
        Pair(prompted(prompt, a), prompted(prompt, b))
        for prompt, (_, a, b) in zip(prompts, drawn, strict=True)
    ]
    samples = [s for pair in pairs for s in (pair.chosen, pair.rejected)]
    flat = [p for rank in pack_pairs(pairs, ranks, budget, share_prompts=True) for p in rank]
    real = [made for made in flat if -1 not in made.samples_S]
    assert all(made.tokens <= budget for made in flat)
    assert sorted(int(i) for made in real for i in made.samples_S) == list(range(len(samples)))
    saved = sum(len(prompt) for prompt in prompts)
    assert sum(made.tokens for made in real) <= sum(len(s.tokens) for s in samples) - saved
    for made in real:
        for i, one in enumerate(made.samples_S):
            assert_holds(made, i, samples[one])


def assert_holds(made: Pack, i: int, want: Sample) -> None:
    """Assert that the i-th sequence of the pack is the sample."""
    leader = max(j for j in range(i + 1) if made.shared_S[j] == 0)
    begin = made.cu_seqlens[leader] + np.arange(made.shared_S[i])
    places = np.concatenate([begin, np.arange(made.cu_seqlens[i], made.cu_seqlens[i + 1])])
    assert made.tokens_T[places].tolist() == want.tokens.tolist()
    assert made.positions_T[places].tolist() == list(range(len(want.tokens)))
    loss_at = np.flatnonzero(want.loss_mask)
    targets = slice(made.cu_loss_tokens[i], made.cu_loss_tokens[i + 1])
    assert made.targets_L[targets].tolist() == want.tokens[loss_at].tolist()
    assert made.predictor_L[targets].tolist() == places[loss_at - 1].tolist()
