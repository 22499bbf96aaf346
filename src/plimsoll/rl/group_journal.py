"""Keep groups and episodes in the journal, and find those of before a crash."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.score import Scored
from plimsoll.run.journal import Journal, RecordKey


@dataclass(frozen=True)
class GroupJournal:
    """The records of a journal whose keys begin alike, such as those of one step.

    Attributes:
        journal: the journal; None: nothing is kept, and nothing is found.
        begin: the beginning of the keys.
    """

    journal: Journal | None = None
    begin: RecordKey = ()

    def under(self, *further: str | int | float) -> GroupJournal:
        """Return the records whose keys go on with these words."""
        return replace(self, begin=(*self.begin, *further))

    def find(self, prompts: Sequence[Prompt]) -> Scored | None:
        """Return the scored trajectories under this key, if there are any.

        `prompts` has the prompt of each trajectory, as the data has it now.
        """
        found = None if self.journal is None else self.journal.groups(self.begin)
        if found is None:
            return None
        pairs = zip(found, prompts, strict=True)
        return Scored(tuple(replace(t, prompt=prompt) for t, prompt in pairs), ())

    def keep(self, scored: Scored) -> None:
        """Keep scored trajectories under this key, if none of them failed."""
        if self.journal is not None and not scored.failures:
            self.journal.add_groups(self.begin, scored.trajectories)

    def keep_result(self, future: Future[Scored]) -> None:
        """Keep the result of a future that is done, if it has one."""
        if not future.cancelled() and future.exception() is None:
            self.keep(future.result())

    def find_episode(self, prompt: Prompt) -> Trajectory | None:
        """Return the episode under this key, which is not scored yet, if it is there."""
        found = self.find([prompt])
        return None if found is None else found.trajectories[0]

    def keep_episode(self, trajectory: Trajectory) -> None:
        """Keep an episode that has ended under this key, before its group is scored."""
        self.keep(Scored((trajectory,), ()))


NO_JOURNAL = GroupJournal()


def is_open(
    key: RecordKey, step: int, unlearned: Collection[int], next_place: int, saved: int
) -> bool:
    """Return whether a record of the journal is needed once a step has its trajectories.

    A resumed run learns again from the files of earlier steps; what was sampled for later ones is
    needed after them.

    Args:
        key: the record's key.
        step: the step.
        unlearned: see `RunState`.
        next_place: see `RunState`; both as they are after the step.
        saved: the step of the oldest checkpoint, or -1.
    """
    match key:
        case ("group", place, *_):
            return place in unlearned or int(place) >= next_place
        case ("request", of, *_):
            return int(of) > step
        case ("held out", after, *_):
            return int(after) >= step
        case ("figures", after):
            return int(after) > saved
    return False
