"""Pack a step's trajectories once, for scoring and for the losses.

Numbers of learned tokens (log-probs, values, advantages) have one form from scoring to the losses:
an array for each trajectory, in the order of the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.cluster.protocol import Group, SentOnce
from plimsoll.data.packing import pack, pack_groups
from plimsoll.records import (
    BatchCounts,
    Column,
    Entries,
    Floats,
    Ints,
    Pack,
    Sample,
    Trajectory,
    from_packed,
)
from plimsoll.resolve.roles import RoleName


@dataclass(frozen=True)
class MiniBatch:
    """The data of one optimizer step: the packs of each rank, and the counts over all ranks.

    The packs are scored and then learned from, perhaps by several roles and in several epochs.
    """

    packs: list[SentOnce[Pack]]
    counts: BatchCounts


def packed_order(minis: Sequence[MiniBatch]) -> Ints:
    """Return the numbers of the trajectories in the order in which the packs hold them.

    Sums over a batch are taken in this order.
    """
    packs = [pack for mini in minis for rank_packs in mini.packs for pack in rank_packs]
    order = np.concatenate([pack.samples_S for pack in packs])
    return order[order >= 0]


def divide(column_L: NDArray[Any], order: Ints, like: Entries) -> list[NDArray[Any]]:
    """Return an array for each trajectory, cut from a column.

    Args:
        column_L: the numbers of all learned tokens.
        order: the numbers of the trajectories, in the order of the column.
        like: entries of the same tokens.
    """
    pieces = np.split(column_L, np.cumsum([len(like[i]) for i in order])[:-1])
    return [pieces[place] for place in np.argsort(order)]


def score(
    minis: Sequence[MiniBatch], group: Group, task: Callable[..., list[Floats]], role: RoleName
) -> Entries:
    """Run a method of `Worker` for a role on all packs; return the scores by trajectory."""
    by_rank = [*zip(*(mini.packs for mini in minis), strict=True)]
    scores = group.call(task, [(role, *rank_minis) for rank_minis in by_rank]).result()
    return from_packed(chain(*chain(*by_rank)), chain(*scores))


def learned_columns(
    trajectories: Sequence[Trajectory], wanted: Iterable[Column]
) -> dict[Column, Entries]:
    """Return the wanted columns that the trajectories have, for their learned tokens.

    Raises KeyError if only some of the trajectories have a column.
    """
    return {
        column: [t.learned(t.columns[column]) for t in trajectories]
        for column in wanted
        if any(column in t.columns for t in trajectories)
    }


def lay_out(
    trajectories: Sequence[Trajectory],
    members: Sequence[Ints],
    ranks: int,
    budget: int,
    *,
    beside: Sequence[int] | None,
) -> list[MiniBatch]:
    """Pack the mini-batches; `samples_S` of the packs are the numbers of the trajectories.

    Args:
        trajectories: all trajectories of the step.
        members: the indices of each mini-batch's trajectories.
        ranks: the number of ranks.
        budget: the most tokens of a pack.
        beside: a number for each trajectory. If trajectories with the same number are in one pack,
            the tokens that they begin with alike are packed once. None: no tokens are shared.
    """
    samples = [_sample(t) for t in trajectories]
    minis: list[MiniBatch] = []
    for numbers in members:
        mini_samples = [samples[i] for i in numbers]
        if beside is None:
            packed = pack(mini_samples, ranks, budget)
        else:
            packed = pack_groups(mini_samples, [beside[i] for i in numbers], ranks, budget)
        packs = [SentOnce(_renumber(pack, numbers) for pack in own) for own in packed]
        minis.append(MiniBatch(packs, BatchCounts.of(mini_samples)))
    return minis


def _renumber(pack: Pack, numbers: Ints) -> Pack:
    """Return a mini-batch's pack with the numbers of the trajectories; a filler keeps its -1."""
    return replace(pack, samples_S=np.where(pack.samples_S < 0, -1, numbers[pack.samples_S]))


def _sample(trajectory: Trajectory) -> Sample:
    prompt, response = trajectory.prompt.tokens, trajectory.response_tokens
    loss_mask = np.concatenate([np.zeros(len(prompt), np.bool_), trajectory.loss_mask])
    return Sample(np.concatenate([prompt, response]), loss_mask, trajectory.routing)
