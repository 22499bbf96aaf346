"""The groups of an asynchronous run: which are in flight, which wait, and how old they are.

A group is known by its place: the number of its prompt in the order of the data. Weights are known
by their version, which is the number of the step that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from plimsoll.records import Trajectory


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose trajectories are complete and scored.

    Attributes:
        place: the place of its prompt.
        trajectories: the trajectories, in the order of their numbers.
    """

    place: int
    trajectories: Sequence[Trajectory]

    @cached_property
    def oldest(self) -> int:
        """The oldest version of weights that sampled a token of the group."""
        branches = [branch for t in self.trajectories for branch in t.branches]
        versions = [branch.weight_versions[branch.loss_mask] for branch in branches]
        return min(int(of_branch.min()) for of_branch in versions if len(of_branch))


@dataclass(frozen=True)
class GroupBuffer:
    """The groups of a run that samples while it learns; every method returns the next buffer.

    At most `staleness` + 1 batches are in flight or wait when new weights come, and no more begin
    than keep the ranks busy (`ahead`): what waits for its turn only grows old. A step takes the
    oldest groups first. So only a group that is overtaken can be dropped, one in whose flight a
    step learned from younger ones: of the groups that are as old or older, no more are left than
    the steps take for which it is young enough.

    Attributes:
        prompts: the groups that a step learns from.
        staleness: by how many versions a token may be older than the weights that learn from it.
        at_once: the most groups in flight.
        steps: the number of the run's last step; nothing is sampled for later ones.
        learns: the version of the weights that learn next.
        next_place: the place of the next new prompt.
        again: places of prompts that were drawn and are to be sampled again, before new ones.
        in_flight: places of the groups that are being sampled.
        finished: the groups that wait, in the order in which they ended.
        taken: the number of groups that the next step has taken so far.
        dropped: the number of groups that were too old for the next step.
        ahead: how many batches are sampled ahead of the one that learns, from 1 to `staleness`.
    """

    prompts: int
    staleness: int
    at_once: int
    steps: int
    learns: int
    next_place: int
    again: tuple[int, ...] = ()
    in_flight: frozenset[int] = frozenset()
    finished: tuple[FinishedGroup, ...] = ()
    taken: int = 0
    dropped: int = 0
    ahead: int = 1

    def room(self, version: int) -> int:
        """Return how many groups may begin while the engines have weights of `version`."""
        steps = min(self.ahead + 1 + version, self.steps) - self.learns
        most = steps * self.prompts
        room = most - len(self.in_flight) - len(self.finished) - self.taken
        return max(0, min(room, self.at_once - len(self.in_flight)))

    def begin(self, version: int) -> tuple[GroupBuffer, list[int]]:
        """Fill the room; return the new buffer and the places of the groups to sample."""
        room = self.room(version)
        again, new = self.again[:room], max(0, room - len(self.again))
        places = [*again, *range(self.next_place, self.next_place + new)]
        buffer = replace(
            self,
            again=self.again[room:],
            next_place=self.next_place + new,
            in_flight=self.in_flight.union(places),
        )
        return buffer, places

    def finish(self, group: FinishedGroup) -> GroupBuffer:
        """Let a group wait that was in flight; drop it if it is too old for the next step."""
        buffer = self.give_up(group.place)
        return replace(buffer, finished=(*self.finished, group))._without_old()

    def give_up(self, place: int) -> GroupBuffer:
        """Forget a group in flight, which failed; its prompt is not sampled again."""
        assert place in self.in_flight
        return replace(self, in_flight=self.in_flight - {place})

    def take(self, count: int) -> tuple[GroupBuffer, list[FinishedGroup]] | None:
        """Take groups for the next step, sorted by their places; None if too few have ended.

        They are the oldest ones; of equal age, those that ended first.
        """
        if len(self.finished) < count:
            return None
        taken = sorted(self.finished, key=lambda group: group.oldest)[:count]
        places = {group.place for group in taken}
        rest = tuple(group for group in self.finished if group.place not in places)
        buffer = replace(self, finished=rest, taken=self.taken + count)
        return buffer, sorted(taken, key=lambda group: group.place)

    def set_aside(self, count: int) -> GroupBuffer:
        """Make room for others instead of groups that were taken and teach nothing."""
        return replace(self, taken=self.taken - count)

    def advance(self, waited: bool) -> GroupBuffer:
        """Return the buffer for the step after the one that has taken its groups.

        It samples a batch further ahead if the ranks have waited for groups, and a batch less if
        the groups of the next step wait already.
        """
        ahead = self.ahead + waited - (len(self.finished) >= self.prompts)
        ahead = max(1, min(ahead, self.staleness))
        buffer = replace(self, learns=self.learns + 1, taken=0, dropped=0, ahead=ahead)
        return buffer._without_old()

    def _without_old(self) -> GroupBuffer:
        old = [
            group.place for group in self.finished if self.learns - group.oldest > self.staleness
        ]
        if not old:
            return self
        return replace(
            self,
            finished=tuple(group for group in self.finished if group.place not in old),
            again=tuple(sorted((*self.again, *old))),
            dropped=self.dropped + len(old),
        )

    @property
    def unlearned(self) -> tuple[int, ...]:
        """The places of prompts that were drawn, and that no step has learned from or given up."""
        waiting = (group.place for group in self.finished)
        return tuple(sorted(chain(self.again, self.in_flight, waiting)))

    @property
    def settled(self) -> int:
        """The number of prompts that were learned from or given up."""
        return self.next_place - len(self.unlearned)


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return how many versions old the sampled tokens are for weights of `version`.

    `staleness/continued` is the share of sampled tokens that follow after a sync in a response
    that began before it.
    """
    branches = [branch for t in trajectories for branch in t.branches]
    sampled = [branch.weight_versions[branch.loss_mask] for branch in branches]
    sampled = [versions for versions in sampled if len(versions)]
    ages = version - np.concatenate(sampled)
    continued = np.concatenate([versions > versions[0] for versions in sampled])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/p90": float(np.quantile(ages, 0.9)),
        "staleness/max": float(ages.max()),
        "staleness/continued": float(continued.mean()),
    }
