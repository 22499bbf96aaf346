"""Columns of a step and its trajectories: every number lands at its own token, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Group, Pending
from plimsoll.records import (
    ADVANTAGES,
    SAMPLER_LOGPROBS,
    WEIGHT_VERSIONS,
    Floats,
    Pack,
    Prompt,
    Trajectory,
)
from plimsoll.rl.layout import MiniBatch, divide, lay_out, packed_order, score
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
        columns={
            SAMPLER_LOGPROBS: np.zeros(length, dtype=np.float32),
            WEIGHT_VERSIONS: np.zeros(length, dtype=np.int64),
        },
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
        self, task: Callable[..., Any], per_stream: Iterable[tuple[object, ...]]
    ) -> Pending[Any]:
        found = []
        for role, *minis in cast("Iterable[tuple[str, list[Pack]]]", per_stream):
            assert role == "actor"
            found.append([pack.targets_L.astype(np.float32) for pack in chain(*minis)])
        assert len(found) == self.streams and task is Worker.log_probs
        return Pending(lambda: found)


def packs_of(minis: Sequence[MiniBatch]) -> list[Pack]:
    return [pack for mini in minis for own in mini.packs for pack in own]


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
def test_scores_come_back_to_their_trajectories_and_packs_take_their_own_part(
    groups: list[tuple[int, list[list[bool]]]],
    minis: int,
    ranks: int,
    share_prompts: bool,
    seed: int,
) -> None:
    trajectories = of_groups(groups)
    laid_out = lay_out(
        trajectories,
        divided(trajectories, minis, seed),
        ranks,
        BUDGET,
        beside=groups_of(trajectories, share_prompts),
    )
    own, order = [learned(t) for t in trajectories], packed_order(laid_out)
    assert sorted(order.tolist()) == list(range(len(trajectories)))
    taken = [ADVANTAGES.cut(own, pack) for pack in packs_of(laid_out)]
    for pack, part in zip(packs_of(laid_out), taken, strict=True):
        assert part.tolist() == pack.targets_L.tolist()
    column_L = np.concatenate([own[i] for i in order])
    assert np.concatenate(taken).tolist() == column_L.tolist()
    back = divide(column_L, order, own)
    assert [x.tolist() for x in back] == [x.tolist() for x in own]
    scored = score(laid_out, cast(Group, Scoring(ranks)), Worker.log_probs, "actor")
    assert [x.tolist() for x in scored] == [x.tolist() for x in own]
    assert {x.dtype for x in scored} == {np.dtype(np.float32)}


@given(GROUPS, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_counts_and_packs_are_of_each_mini_batch_alone(
    groups: list[tuple[int, list[list[bool]]]], minis: int, ranks: int, share_prompts: bool
) -> None:
    trajectories = of_groups(groups)
    members = divided(trajectories, minis, seed=0)
    laid_out = lay_out(
        trajectories, members, ranks, BUDGET, beside=groups_of(trajectories, share_prompts)
    )
    for mini, own in zip(laid_out, members, strict=True):
        packs = list(chain.from_iterable(mini.packs))
        numbers = [int(i) for pack in packs for i in pack.samples_S if i >= 0]
        assert sorted(numbers) == sorted(own.tolist())
        assert mini.counts.sequences == len(own)
        assert mini.counts.tokens == sum(pack.loss_tokens for pack in packs)
        assert len({len(of_rank) for of_rank in mini.packs}) == 1 and len(mini.packs) == ranks


def test_a_filler_takes_nothing_and_a_prompt_is_held_once() -> None:
    trajectories = of_groups([(5, [[True, True], [True]])])
    laid_out = lay_out(
        trajectories, [np.array([1, 0])], 1, BUDGET, beside=groups_of(trajectories, True)
    )
    [[pack]] = laid_out[0].packs
    assert pack.tokens == 5 + 2 + 1  # rather than 7 + 6
    one = lay_out(
        trajectories[:1], [np.array([0])], 2, BUDGET, beside=groups_of(trajectories, True)
    )
    taken = [ADVANTAGES.cut([np.array([3.0, 4.0])], p).tolist() for p in packs_of(one)]
    assert sorted(taken) == [[], [3.0, 4.0]]
