"""A reward function in processes of its own: whatever it does to one, the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plimsoll.records import Trajectory
from plimsoll.reward.functions.calls import Setup
from plimsoll.reward.functions.children import ChildEnded, Children
from plimsoll.reward.outcome import Failed, Outcome, TimeLimit


class ProcessPool:
    """Processes that each call a function for one list of trajectories at a time.

    Args:
        setup: what each process is told first.
        limit: how long a call may take.
        size: the number of processes, at most.
    """

    def __init__(self, setup: Setup, limit: TimeLimit, size: int) -> None:
        what = f"reward function {setup.name}"
        self._children = Children("plimsoll.reward.functions.worker", what, setup, size)
        self._limit = limit

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """What the function gives, or failures where its process did not answer.

        Raises PlimsollError where no process can be started.
        """
        wanted, sent = len(trajectories), [replace(t, transcript=None) for t in trajectories]
        async with self._children.one() as child:
            try:
                found: list[Outcome] = await child.ask(sent, self._limit.seconds)
            except TimeoutError:
                return [self._limit.exceeded(after="; its process was ended")] * wanted
            except ChildEnded as ended:
                return [Failed(f"'s process {ended}")] * wanted
        return found

    async def close(self) -> None:
        """End all of them."""
        await self._children.close()
