"""Keep a step's learned tokens in one order, from scoring to the losses.

A step is packed once. Numbers for its learned tokens (log-probs, values, advantages) are columns of
shape [L] in the order of the packs, so the numbers of a pack are a slice of a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.cluster.protocol import Group
from plimsoll.data.packing import pack, pack_groups
from plimsoll.records import (
    BatchCounts,
    Column,
    Floats,
    Ints,
    Pack,
    Sample,
    Trajectory,
    from_packed,
)
from plimsoll.resolve.roles import RoleName
from plimsoll.trainer.worker import Worker

ByTrajectory = Sequence[Floats]
"""For each trajectory, a number for each of its learned tokens."""


@dataclass(frozen=True)
class MiniBatch:
    """The data of one optimizer step: the packs of each rank, and the counts over all ranks."""

    packs: list[list[Pack]]
    counts: BatchCounts


@dataclass(frozen=True)
class ColumnLayout:
    """A step's trajectories in packs, for one group of ranks.

    Attributes:
        minis: the mini-batches.
        trajectory_S: the index of the trajectory that each sequence is. `samples_S` of the packs
            are the numbers of the sequences, from 0 over all packs.
        cu_loss_tokens: the position in a column at which each sequence's learned tokens begin, and
            the end of the last; shape [S + 1].
    """

    minis: list[MiniBatch]
    trajectory_S: Ints
    cu_loss_tokens: Ints

    def score(
        self,
        group: Group,
        task: Callable[[Worker, RoleName, Sequence[Pack]], list[Floats]],
        role: RoleName,
    ) -> Floats:
        """Run `task` for a role on all packs, each on its rank; return the scores as a column."""
        every = zip(*(mini.packs for mini in self.minis), strict=True)
        packs = [[packed for mini in rank_packs for packed in mini] for rank_packs in every]
        answers = group.call(task, [(role, rank_packs) for rank_packs in packs]).result()
        flat = chain.from_iterable
        return np.concatenate(from_packed(flat(packs), flat(answers), len(self.trajectory_S)))

    def column(self, by_trajectory: ByTrajectory, dtype: str = "float32") -> NDArray[Any]:
        """Return a column made from an array for each trajectory."""
        return np.concatenate([by_trajectory[i] for i in self.trajectory_S], dtype=dtype)

    def columns_of(
        self, trajectories: Sequence[Trajectory], wanted: Iterable[Column]
    ) -> dict[Column, NDArray[Any]]:
        """Return the wanted columns that the trajectories have, for their learned tokens.

        Raises KeyError if only some of the trajectories have a column.
        """
        return {
            column: self.column(
                [t.columns[column][t.loss_mask] for t in trajectories], column.dtype
            )
            for column in wanted
            if any(column in t.columns for t in trajectories)
        }

    def by_sequence(self, column_L: NDArray[Any]) -> list[NDArray[Any]]:
        """Return an array for each sequence, by the numbers in the packs' `samples_S`."""
        return np.split(column_L, self.cu_loss_tokens[1:-1])

    def by_trajectory(self, column_L: Floats) -> list[Floats]:
        """Return an array for each trajectory, cut from a column: the inverse of `column`."""
        pieces = self.by_sequence(column_L)
        return [pieces[i] for i in self._sequence_of]

    def in_order(self, column_L: Floats) -> Floats:
        """Return a column in the order of the trajectories.

        Sums in this order are rounded in the same way, however the trajectories are packed.
        """
        return np.concatenate(self.by_trajectory(column_L))

    def move_to(self, column_L: Floats, target: ColumnLayout) -> Floats:
        """Return a column of this layout as a column of another layout of the same trajectories."""
        return column_L if target is self else target.column(self.by_trajectory(column_L))

    @cached_property
    def _sequence_of(self) -> Ints:
        return np.argsort(self.trajectory_S)


def lay_out(
    trajectories: Sequence[Trajectory],
    members: Sequence[Ints],
    ranks: int,
    budget: int,
    *,
    beside: Sequence[int] | None,
) -> ColumnLayout:
    """Pack the mini-batches, and return the layout.

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
    """Return the packs with their sequences numbered from `first` on, and the old numbers."""
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
