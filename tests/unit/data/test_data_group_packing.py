"""Packing of groups that begin alike: every sample once, the budget, equal numbers, one prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_data_packing import assert_holds, prompted  # type: ignore[import-not-found]

from plimsoll.data.packing import pack, pack_groups, pack_one, split_packs
from plimsoll.errors import DataError
from plimsoll.records import Pack, Sample


def of_group(group: int, prompt: int, responses: list[int]) -> list[Sample]:
    """Return responses with these numbers of tokens, all different, to one prompt."""
    first = 1000 * group
    return [
        prompted(
            list(range(first, first + prompt)),
            list(range(first + 100 * (i + 1), first + 100 * (i + 1) + n)),
        )
        for i, n in enumerate(responses)
    ]


def of_groups(groups: list[tuple[int, list[int]]]) -> tuple[list[Sample], list[int]]:
    members = [of_group(i, *group) for i, group in enumerate(groups)]
    return [s for g in members for s in g], [i for i, g in enumerate(members) for _ in g]


def real(packs: list[list[Pack]]) -> list[Pack]:
    return [p for rank in packs for p in rank if -1 not in p.samples_S]


def test_a_group_that_fits_is_one_pack_with_its_prompt_once() -> None:
    """Two groups have 11 tokens in one pack; without sharing, 19 in two."""
    samples, group_S = of_groups([(4, [1, 2, 1]), (2, [1])])
    [[made]] = pack_groups(samples, group_S, ranks=1, budget=11)
    assert made.tokens == 4 + 1 + 2 + 1 + 2 + 1
    assert made.samples_S.tolist() == [0, 1, 2, 3] and made.shared_S.tolist() == [0, 4, 4, 0]
    assert len(pack(samples, 1, 11)[0]) == 2


def test_a_group_over_the_budget_is_divided_and_each_part_has_the_prompt() -> None:
    """A prompt of 4 tokens with two responses of 3 tokens takes 10 tokens."""
    samples, group_S = of_groups([(4, [3, 3, 3, 3, 3])])
    [packs] = pack_groups(samples, group_S, ranks=1, budget=10)
    assert sorted(made.tokens for made in packs) == [7, 10, 10]
    assert sorted(len(made.samples_S) for made in packs) == [1, 2, 2]


def test_a_group_over_a_ranks_share_is_divided_among_the_ranks() -> None:
    samples, group_S = of_groups([(2, [6, 6, 6, 6])])
    packs = pack_groups(samples, group_S, ranks=2, budget=100)
    assert [[len(made.samples_S) for made in rank] for rank in packs] == [[2], [2]]


def test_a_branch_shares_what_was_learned_in_the_sample_before_it() -> None:
    """[0 1 | 2 3] 4 [5 |] and [0 1 2 3 9 | 7]: the second adds 9 and 7, and learns only 7."""
    first = Sample(np.arange(6), np.array([0, 0, 1, 1, 0, 1], np.bool_))
    second = Sample(np.array([0, 1, 2, 3, 9, 7]), np.array([0, 0, 0, 0, 0, 1], np.bool_))
    [[made]] = pack_groups([first, second], [0, 0], ranks=1, budget=20)
    assert made.tokens_T.tolist() == [0, 1, 2, 3, 4, 5, 9, 7]
    assert (made.shared_S.tolist(), made.targets_L.tolist()) == ([0, 4], [2, 3, 5, 7])
    assert made.predictor_L.tolist() == [1, 2, 4, 6]
    [[apart]] = pack_groups([second, first], [0, 0], ranks=1, budget=20)
    assert apart.shared_S.tolist() == [0, 2]  # what is learned must be there itself


def test_members_of_a_group_may_stand_apart() -> None:
    samples, group_S = of_groups([(5, [1, 1]), (6, [1, 1])])
    order = [2, 0, 3, 1]
    [packs] = pack_groups(
        [samples[i] for i in order], [group_S[i] for i in order], ranks=1, budget=8
    )
    assert sorted(made.samples_S.tolist() for made in packs) == [[0, 2], [1, 3]]
    assert sorted(made.tokens for made in packs) == [7, 8]


def test_a_sample_over_the_budget_is_refused() -> None:
    samples, group_S = of_groups([(4, [1, 1]), (9, [3])])
    with pytest.raises(DataError, match=r"12 tokens.*budget.* 10 "):
        pack_groups(samples, group_S, ranks=1, budget=10)


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@given(GROUPS, st.integers(1, 4), st.integers(32, 150), st.randoms())
@example([(20, [12] * 6)], 3, 32, None)
@example([(1, [12, 12, 12, 12, 7, 3])], 1, 32, None)
def test_every_sample_once_within_the_budget_and_as_many_packs_on_every_rank(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int, random: object
) -> None:
    samples, group_S = of_groups(groups)
    order = list(range(len(samples)))
    if random is not None:
        random.shuffle(order)  # type: ignore[attr-defined]
    samples, group_S = [samples[i] for i in order], [group_S[i] for i in order]
    packs = pack_groups(samples, group_S, ranks, budget)
    assert len(packs) == ranks and len({len(rank) for rank in packs}) == 1
    assert all(0 < made.tokens <= budget for rank in packs for made in rank)
    placed = [int(i) for made in real(packs) for i in made.samples_S]
    assert sorted(placed) == list(range(len(samples)))
    for made in real(packs):
        for i, number in enumerate(made.samples_S):
            assert_holds(made, i, samples[number])
    most = min(budget, -(-sum(len(s.tokens) for s in samples) // ranks))
    for group, (prompt, responses) in enumerate(groups):
        members = [i for i, g in enumerate(group_S) if g == group]
        if (
            prompt + sum(responses) + len(members) <= most
        ):  # one token each where a response is empty
            [made] = [made for made in real(packs) if set(members) & set(made.samples_S.tolist())]
            places = [i for i, number in enumerate(made.samples_S) if number in members]
            assert places == list(range(places[0], places[0] + len(members)))
            shared = made.shared_S[places].tolist()
            assert shared[0] == 0
            assert all(n >= prompt - 1 for n in shared[1:])


@given(GROUPS, st.integers(1, 3))
@example([(2, [1, 4, 1, 4])], 3)
def test_with_room_for_all_a_prompt_is_held_twice_by_rank_at_most(
    groups: list[tuple[int, list[int]]], ranks: int
) -> None:
    samples, group_S = of_groups(groups)
    packs = pack_groups(samples, group_S, ranks, budget=10_000)
    assert all(len(rank) == 1 for rank in packs)
    for group, (prompt, responses) in enumerate(groups):
        begins = [
            made
            for made in real(packs)
            for i, number in enumerate(made.samples_S)
            if group_S[number] == group and made.shared_S[i] == 0
        ]
        if prompt > 1 and all(responses):
            # Parts are filled in order: two that follow each other are more than a rank's share.
            assert len(begins) <= 2 * ranks


def test_packing_depends_on_its_arguments_alone() -> None:
    samples, group_S = of_groups([(1 + i % 5, [i % 4, 3, 1]) for i in range(20)])
    one, two = (pack_groups(samples, np.array(group_S), 3, 40) for _ in range(2))
    assert [[p.samples_S.tolist() for p in rank] for rank in one] == [
        [p.samples_S.tolist() for p in rank] for rank in two
    ]


def sequences(packs: list[Pack]) -> list[tuple[int, list[int], list[int]]]:
    """Return number, learned tokens and their predictors of each sequence that is no filler."""
    found = []
    for made in packs:
        for i, number in enumerate(made.samples_S.tolist()):
            learned = slice(*made.cu_loss_tokens[i : i + 2])
            before = made.tokens_T[made.predictor_L[learned]]
            found.append((number, made.targets_L[learned].tolist(), before.tolist()))
    return [sequence for sequence in found if sequence[0] >= 0]


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 8), min_size=1, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 30),
    st.booleans(),
)
def test_packs_that_are_split_have_the_same_sequences_in_the_same_order(
    groups: list[tuple[int, list[int]]], budget: int, shared: bool
) -> None:
    samples, group_S = of_groups(groups)
    packs = pack_groups(samples, group_S, 2, 60) if shared else pack(samples, 2, 60)
    split = split_packs(packs, budget, unit=1)
    assert len(split[0]) == len(split[1])
    for before, after in zip(packs, split, strict=True):
        assert sequences(after) == sequences(before)
        for made in after:
            assert made.tokens <= budget or len(made.samples_S) == 1


def test_a_split_keeps_pairs_together_and_fills_up_the_other_rank() -> None:
    samples, _ = of_groups([(2, [2]), (2, [2]), (2, [2]), (2, [2])])
    left = [pack_one(samples, [0, 1, 2, 3])]
    right = [pack_one(samples, [0])]
    [parts, filled] = split_packs([left, right], 6, unit=2)
    assert [made.samples_S.tolist() for made in parts] == [[0, 1], [2, 3]]
    assert [made.samples_S.tolist() for made in filled] == [[0], [-1]]
    assert split_packs([left, right], 16, unit=2) == [left, right]


def routed(sample: Sample, first: int, missing: int) -> Sample:
    """Return the sample with an expert of its own for each token but the last `missing` ones."""
    rows = np.arange(first, first + len(sample.tokens) - missing, dtype=np.uint8)
    return replace(sample, routing=rows[:, None, None])


def numbers(made: Pack) -> list[int]:
    assert made.routing_T is not None and made.routing_T.shape == (made.tokens, 1, 1)
    return [int(number) for number in made.routing_T.ravel()]


def test_experts_follow_their_tokens() -> None:
    """Shared tokens have their leader's; a token without any has 255, as all of a filler."""
    samples, group_S = of_groups([(2, [1, 2]), (1, [2])])
    samples = [routed(samples[0], 0, 1), routed(samples[1], 10, 1), samples[2]]
    [[made]] = pack_groups(samples, group_S, ranks=1, budget=20)
    assert made.samples_S.tolist() == [0, 1, 2] and made.shared_S.tolist() == [0, 2, 0]
    assert numbers(made) == [0, 1, 255, 12, 255, 255, 255, 255]
    [[first, second, third]] = split_packs([[made]], 4, 1)
    assert numbers(first) == [0, 1, 255]
    assert numbers(second) == [0, 1, 12, 255]  # with the prompt of the leader
    assert numbers(third) == [255, 255, 255]
    filled = pack_groups(samples[:1], [0], ranks=2, budget=20)
    assert [{*numbers(rank[0])} for rank in filled].count({255}) == 1


def test_many_experts_have_wider_numbers() -> None:
    sample = prompted([1, 2], [3])
    wide = replace(sample, routing=np.full((2, 1, 1), 300, np.int16))
    assert numbers(pack_one([wide], [0])) == [300, 300, -1]
