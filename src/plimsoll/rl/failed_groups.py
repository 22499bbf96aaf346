"""The groups of responses that a reward or an environment failed for, counted as they fail."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.config.batch import RlBatch
from plimsoll.reward.score import RewardFailure
from plimsoll.run.counting import counted

_KEY = "batch.max_failed_groups"

Note = Callable[[str], None]
"""A function that shows a line while the run goes on."""


class FailedGroups:
    """An `OnFailure` that shows and counts failures, and ends the run at the first group too many.

    It shows the first try of each reward that got no answer.
    """

    def __init__(self, note: Note, batch: RlBatch | None = None) -> None:
        """Begin without failures; without `batch` no group may fail."""
        self._note = note
        self._batch = batch
        self._allowed = 0 if batch is None else max(1, int(batch.max_failed_groups * batch.prompts))
        self._noted: set[str] = set()
        self._first: dict[int, RewardFailure] = {}

    def __len__(self) -> int:
        """Return the number of groups that are lost."""
        return len(self._first)

    def __call__(self, failure: RewardFailure) -> None:
        """Count a failed try; PlimsollError, once, if more groups are lost than may be.

        What fails after that is not counted, because the run is ending.
        """
        if failure.unanswered and failure.reward not in self._noted:
            self._noted.add(failure.reward)
            self._note(f"{failure.where}{failure.said}. {self._what_follows(failure.tries_left)}")
        if failure.tries_left or self._is_over():
            return
        self._first.setdefault(failure.group, failure)
        if self._is_over():
            raise self._error()

    def _is_over(self) -> bool:
        return len(self._first) > self._allowed

    def _what_follows(self, tries_left: int) -> str:
        if tries_left:
            again = f"It is tried {counted(tries_left, 'more time')}"
        else:
            again = "It is not tried again (retries)"
        if self._batch is None:
            return f"{again}. A held-out prompt without its reward ends the run."
        groups = counted(self._allowed, "group")
        return f"{again}. The run ends if more than {groups} of a step fail ({_KEY})."

    def _error(self) -> Exception:
        first = next(iter(self._first.values()))
        if self._batch is None:
            return first.error()
        return first.kind(
            f"{first.what} failed for {counted(len(self._first), 'group')} of a step of "
            f"{self._batch.prompts}, and {_KEY} is {self._batch.max_failed_groups:g}. The first: "
            f"{first}"
        )
