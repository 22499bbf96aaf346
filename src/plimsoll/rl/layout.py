"""The order of a step's learned tokens, the same from scoring to the losses.

A step is packed once. All that belongs to its tokens (log-probs, values, advantages) is a column of
shape [L], in the order of the packs; a pack's part of a column is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from plimsoll.cluster.protocol import Ranks
from plimsoll.data.packing import pack, pack_groups
from plimsoll.engine.worker import Worker
from plimsoll.records import BatchCounts, Floats, Ints, Pack, Sample, Trajectory
from plimsoll.spec.roles import RoleName

ByTrajectory = Sequence[Floats]
"""For each trajectory, a number for each of its learned tokens."""


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees: the packs of each rank, and counts over all of them."""

    packs: list[list[Pack]]
    counts: BatchCounts


@dataclass(frozen=True)
class ColumnLayout:
    """A step's trajectories in packs, for one group of ranks.

    Attributes:
        minis: the mini-batches.
        trajectory_S: which trajectory each sequence is. The packs' `samples_S` number the sequences
            through, in this order.
        cu_loss_tokens: where each sequence's learned tokens begin, and where the last's end; shape
            [S + 1].
    """

    minis: list[MiniBatch]
    trajectory_S: Ints
    cu_loss_tokens: Ints

    def of_pack(self, column_L: Floats, pack: Pack) -> Floats:
        """Return a pack's part of a column; of a filler, nothing."""
        return column_L[self._place(pack)]

    def score(
        self,
        ranks: Ranks,
        task: Callable[[Worker, RoleName, Sequence[Pack]], list[Floats]],
        role: RoleName,
    ) -> Floats:
        """Have all ranks score all packs; return the scores as a column."""
        every = zip(*(mini.packs for mini in self.minis), strict=True)
        packs = [[packed for mini in rank_packs for packed in mini] for rank_packs in every]
        answers = ranks.each(task, [(role, rank_packs) for rank_packs in packs])
        column_L = np.zeros(self.cu_loss_tokens[-1], dtype=np.float32)
        for rank_packs, values in zip(packs, answers, strict=True):
            for packed, values_L in zip(rank_packs, values, strict=True):
                column_L[self._place(packed)] = values_L
        return column_L

    def column(self, by_trajectory: ByTrajectory) -> Floats:
        """Return what is known by trajectory as a column."""
        parts = [by_trajectory[i] for i in self.trajectory_S]
        return np.concatenate(parts, dtype=np.float32)

    def by_trajectory(self, column_L: Floats) -> list[Floats]:
        """Return a column by trajectory: the inverse of `column`."""
        pieces = np.split(column_L, self.cu_loss_tokens[1:-1])
        return [pieces[i] for i in self._sequence_of]

    def in_order(self, column_L: Floats) -> Floats:
        """Return a column in the trajectories' order, in which sums round alike in any packs."""
        return np.concatenate(self.by_trajectory(column_L))

    def move_to(self, column_L: Floats, target: ColumnLayout) -> Floats:
        """Return a column of this layout as a column of another layout of the same trajectories."""
        return column_L if target is self else target.column(self.by_trajectory(column_L))

    @cached_property
    def _sequence_of(self) -> Ints:
        return np.argsort(self.trajectory_S)

    def _place(self, pack: Pack) -> slice:
        sequences = pack.samples_S[pack.samples_S >= 0]
        if len(sequences) == 0:
            return slice(0, 0)
        return slice(self.cu_loss_tokens[sequences[0]], self.cu_loss_tokens[sequences[-1] + 1])


def lay_out(
    trajectories: Sequence[Trajectory],
    members: Sequence[Ints],
    ranks: int,
    budget: int,
    *,
    beside: Sequence[int] | None,
) -> ColumnLayout:
    """Pack the mini-batches.

    `members` says which trajectories each mini-batch holds; `budget` is the most tokens of a pack.
    `beside` has a number for each trajectory: those of one number in one micro-batch share the
    tokens that they begin with alike. None: each is packed whole.
    """
    samples = [_sample(t) for t in trajectories]
    minis: list[MiniBatch] = []
    order: list[Ints] = []
    for numbers in members:
        mini_samples = [samples[i] for i in numbers]
        if beside is None:
            packed = pack(mini_samples, ranks, budget)
        else:
            packed = pack_groups(mini_samples, [beside[i] for i in numbers], ranks, budget)
        packs, places = _renumber(packed, sum(map(len, order)))
        minis.append(MiniBatch(packs, BatchCounts.of(mini_samples)))
        order.append(numbers[places])
    trajectory_S = np.concatenate(order)
    lengths = [int(samples[i].loss_mask.sum()) for i in trajectory_S]
    return ColumnLayout(minis, trajectory_S, np.cumsum([0, *lengths]))


def _renumber(packs: list[list[Pack]], first: int) -> tuple[list[list[Pack]], Ints]:
    """Return the packs with sequences numbered through from `first`, and their old numbers."""
    places: list[int] = []

    def renumber(pack: Pack) -> Pack:
        start = first + len(places)
        places.extend(i for i in pack.samples_S.tolist() if i >= 0)
        numbers = np.arange(start, first + len(places))
        return pack if len(numbers) == 0 else replace(pack, samples_S=numbers)

    return [[renumber(pack) for pack in rank_packs] for rank_packs in packs], np.array(places)


def _sample(trajectory: Trajectory) -> Sample:
    prompt, response = trajectory.prompt.tokens, trajectory.response_tokens
    loss_mask = np.concatenate([np.zeros(len(prompt), np.bool_), trajectory.loss_mask])
    return Sample(np.concatenate([prompt, response]), loss_mask)
