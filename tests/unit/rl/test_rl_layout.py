"""Columns of a step and its trajectories: every number lands at its own token, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Group, Pending
from plimsoll.records import Floats, Pack, Prompt, Trajectory
from plimsoll.rl.layout import ColumnLayout, lay_out
from plimsoll.trainer.worker import Worker

BUDGET = 24


def made(index: int, group: int, prompt: int, loss_mask: Sequence[bool]) -> Trajectory:
    """Its response tokens are 1000 * index, 1000 * index + 1, ...; those of its prompt 7."""
    length = len(loss_mask)
    return Trajectory(
        prompt=Prompt(group, np.full(prompt, 7, dtype=np.int32), "prompt"),
        group=group,
        sample_index=index,
        response_tokens=1000 * index + np.arange(length),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        sampler_logprobs=np.zeros(length, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int64),
        response_text="",
        finish_reason="stop",
    )


def learned(trajectory: Trajectory) -> Floats:
    """A number for each learned token, by which it is known."""
    return trajectory.response_tokens[trajectory.loss_mask].astype(np.float32)


class Scoring:
    """A group that scores each token with its own number."""

    def __init__(self, streams: int) -> None:
        self.streams = streams

    def call(
        self, task: Callable[..., Any], per_stream: Sequence[tuple[object, ...]]
    ) -> Pending[Any]:
        assert len(per_stream) == self.streams and task is Worker.log_probs
        found = []
        for role, packs in cast("Sequence[tuple[str, list[Pack]]]", per_stream):
            assert role == "actor"
            found.append([pack.targets_L.astype(np.float32) for pack in packs])
        return Pending(lambda: found)


def packs_of(layout: ColumnLayout) -> list[Pack]:
    return [pack for mini in layout.minis for own in mini.packs for pack in own]


# Groups of a prompt's length and the loss masks of its responses, with holes, or empty.
MASKS = st.lists(st.booleans(), max_size=8)
GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(MASKS, min_size=1, max_size=4)), min_size=1, max_size=4
)


def groups_of(trajectories: Sequence[Trajectory], shared: bool) -> list[int] | None:
    return [t.group for t in trajectories] if shared else None


def of_groups(groups: list[tuple[int, list[list[bool]]]]) -> list[Trajectory]:
    flat = [(group, n, mask) for group, (n, masks) in enumerate(groups) for mask in masks]
    return [made(i, *one) for i, one in enumerate(flat)]


def divided(trajectories: list[Trajectory], minis: int, seed: int) -> list[Any]:
    """At random, into as many mini-batches as there are trajectories for."""
    shuffled = np.random.default_rng(seed).permutation(len(trajectories))
    return np.array_split(shuffled, min(minis, len(trajectories)))


@given(
    groups=GROUPS,
    minis=st.integers(1, 3),
    ranks=st.integers(1, 3),
    share_prompts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_columns_and_trajectories_are_inverse_and_packs_take_their_own_part(
    groups: list[tuple[int, list[list[bool]]]],
    minis: int,
    ranks: int,
    share_prompts: bool,
    seed: int,
) -> None:
    trajectories = of_groups(groups)
    members = divided(trajectories, minis, seed)
    layout = lay_out(
        trajectories, members, ranks, BUDGET, beside=groups_of(trajectories, share_prompts)
    )
    own = [learned(t) for t in trajectories]
    column_L = layout.column(own)

    assert sorted(layout.trajectory_S.tolist()) == list(range(len(trajectories)))
    assert len(column_L) == sum(map(len, own)) == layout.cu_loss_tokens[-1]
    for s, i in enumerate(layout.trajectory_S):
        part = column_L[layout.cu_loss_tokens[s] : layout.cu_loss_tokens[s + 1]]
        assert part.tolist() == own[i].tolist()
    back = layout.by_trajectory(column_L)
    assert [x.tolist() for x in back] == [x.tolist() for x in own]

    taken = [layout.of_pack(column_L, pack) for pack in packs_of(layout)]
    for pack, part in zip(packs_of(layout), taken, strict=True):
        assert part.tolist() == pack.targets_L.tolist()
    assert sum(map(len, taken)) == len(column_L)
    scored_L = layout.score(cast(Group, Scoring(ranks)), Worker.log_probs, "actor")
    assert scored_L.dtype == np.float32 and scored_L.tolist() == column_L.tolist()


@given(
    groups=GROUPS,
    minis=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    share_prompts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_column_moves_to_the_layout_of_other_ranks_and_mini_batches_and_back(
    groups: list[tuple[int, list[list[bool]]]],
    minis: tuple[int, int],
    ranks: tuple[int, int],
    share_prompts: bool,
    seed: int,
) -> None:
    trajectories = of_groups(groups)
    one, other = (
        lay_out(
            trajectories,
            divided(trajectories, m, seed),
            r,
            BUDGET,
            beside=groups_of(trajectories, share_prompts),
        )
        for m, r in zip(minis, ranks, strict=True)
    )
    own = [learned(t) for t in trajectories]
    moved_L = one.move_to(one.column(own), other)
    assert moved_L.tolist() == other.column(own).tolist()
    assert other.move_to(moved_L, one).tolist() == one.column(own).tolist()
    for pack in packs_of(other):
        assert other.of_pack(moved_L, pack).tolist() == pack.targets_L.tolist()


@given(GROUPS, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_counts_and_packs_are_of_each_mini_batch_alone(
    groups: list[tuple[int, list[list[bool]]]], minis: int, ranks: int, share_prompts: bool
) -> None:
    trajectories = of_groups(groups)
    members = divided(trajectories, minis, seed=0)
    layout = lay_out(
        trajectories, members, ranks, BUDGET, beside=groups_of(trajectories, share_prompts)
    )
    first = 0
    for mini, own in zip(layout.minis, members, strict=True):
        packs = list(chain.from_iterable(mini.packs))
        numbers = [int(i) for pack in packs for i in pack.samples_S if i >= 0]
        assert numbers == list(range(first, first + len(own)))
        assert sorted(layout.trajectory_S[numbers].tolist()) == sorted(own.tolist())
        assert mini.counts.sequences == len(own)
        assert mini.counts.tokens == sum(pack.loss_tokens for pack in packs)
        assert len({len(of_rank) for of_rank in mini.packs}) == 1 and len(mini.packs) == ranks
        first += len(own)


def test_a_filler_takes_nothing_and_a_prompt_is_held_once() -> None:
    trajectories = of_groups([(5, [[True, True], [True]])])
    layout = lay_out(
        trajectories, [np.array([1, 0])], 1, BUDGET, beside=groups_of(trajectories, True)
    )
    [[pack]] = layout.minis[0].packs
    assert pack.tokens == 5 + 2 + 1  # rather than 7 + 6
    one = lay_out(
        trajectories[:1], [np.array([0])], 2, BUDGET, beside=groups_of(trajectories, True)
    )
    taken = [one.of_pack(np.array([3.0, 4.0]), p).tolist() for p in packs_of(one)]
    assert sorted(taken) == [[], [3.0, 4.0]]
