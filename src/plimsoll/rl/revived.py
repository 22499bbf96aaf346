"""Go on after an engine has died: start another in its place, and ask again what is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from plimsoll.errors import EngineDied
from plimsoll.rl.experience import Experience, Source
from plimsoll.rl.setup import RlWork
from plimsoll.run.state import RunState
from plimsoll.run.supervised import count_of, recent

R = TypeVar("R")


class Revived(Source):
    """A `Source` that starts dead engines again, at most `run.restarts` times in an hour.

    The engine gets the ranks' weights, with the proof of every sync. The call in which it died is
    made once more: responses that were scored come from the journal, the others are sampled with
    the same seeds.
    """

    def __init__(self, work: RlWork, source: Source) -> None:
        self._work, self._source = work, source
        if work.spec.run.restarts:
            work.cluster.let_engines_die()
        self._deaths: list[float] = []

    def begin(self, state: RunState) -> None:
        """Get ready to continue after `state`."""
        self._last(lambda: self._source.begin(state), state.weight_version)

    def draw(self, state: RunState) -> Experience:
        """Return the trajectories of the step after `state`."""
        return self._last(lambda: self._source.draw(state), state.weight_version)

    def renew(self, step: int) -> Mapping[str, float]:
        """Take over the ranks' weights after a step."""
        return self._last(lambda: self._source.renew(step), step)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of held-out prompts after a step."""
        return self._last(lambda: self._source.evaluate(step), step)

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards."""
        return self._source.rewards()

    def close(self) -> None:
        """End what goes on beside the steps."""
        self._source.close()

    def _last(self, call: Callable[[], R], version: int) -> R:
        """Return the result of a call, which is made again after each death of an engine."""
        has_failed = False
        while True:
            try:
                if has_failed:
                    self._source.revive(version)
                return call()
            except EngineDied as error:
                self._note(error)
                has_failed = True

    def _note(self, error: EngineDied) -> None:
        most = self._work.spec.run.restarts
        self._deaths.append(time.monotonic())
        if recent(self._deaths) > most:
            raise error
        session, count = self._work.session, count_of(self._deaths, most, "engines")
        session.progress.note(f"{error}\n  The engine is started again ({count})")
        first_line = str(error).partition("\n")[0]
        session.sink.notify(
            f"step {session.step_under_way}: {first_line}. It is started again ({count})"
        )
