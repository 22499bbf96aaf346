"""The sources of rewards, which repeat failed calls, and the event loop of all rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, Unasked

RewardCall = Callable[[Sequence[Trajectory]], Awaitable[Sequence[Outcome]]]
"""One try: takes trajectories and returns an outcome for each, in order. A call limits its own time
and raises nothing for a failed reward."""

LONGEST_WAIT = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Watch:
    """A callback for failures during scoring, and the groups that need no more scores.

    Attributes:
        failed: Called after each failed try, with the trajectory, the failure and the number of
            tries that are left. An error that it raises ends the scoring.
        lost: Groups in which a trajectory failed all its tries. Their other trajectories are not
            scored any more.
    """

    failed: Callable[[Trajectory, Failed, int], None]
    lost: set[int]


@dataclass(frozen=True)
class RewardSource:
    """Scores trajectories by concurrent calls, and repeats the calls that fail.

    Attributes:
        call: One try.
        size: How many trajectories a call takes at most; None for any number.
        retries: Further tries for the trajectories that failed.
        wait: Seconds before the first further try. The wait doubles with each try, up to
            LONGEST_WAIT.
        places: A semaphore for the number of calls at the same time. A call that fails keeps its
            place until its last try. So the first trajectories are settled first, and a source
            that never answers is noticed after a few calls instead of after all.
    """

    call: RewardCall
    size: int | None
    retries: int
    wait: float
    places: asyncio.Semaphore

    async def score(self, trajectories: Sequence[Trajectory], watch: Watch) -> list[Outcome]:
        """Return an outcome for each trajectory, in order.

        It is the last failure if all tries failed, and `Unasked` if the group was lost before.
        """
        size = self.size or max(1, len(trajectories))
        parts = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
        outcomes = await side_by_side(self._try(part, watch) for part in parts)
        return [outcome for part in outcomes for outcome in part]

    async def _try(self, trajectories: Sequence[Trajectory], watch: Watch) -> list[Outcome]:
        results: list[Outcome] = [Unasked()] * len(trajectories)
        async with self.places:
            for attempt in range(1 + self.retries):
                open_rows = [
                    i
                    for i, result in enumerate(results)
                    if isinstance(result, Failed | Unasked)
                    and trajectories[i].group not in watch.lost
                ]
                if not open_rows:
                    break
                if attempt:
                    await asyncio.sleep(min(LONGEST_WAIT, self.wait * 2 ** (attempt - 1)))
                outcomes = await self.call([trajectories[i] for i in open_rows])
                for i, outcome in zip(open_rows, outcomes, strict=True):
                    results[i] = outcome
                    if isinstance(outcome, Failed):
                        watch.failed(trajectories[i], outcome, self.retries - attempt)
        return results


async def side_by_side(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines concurrently and return their results, in order.

    If a coroutine raises, cancel the others and raise its error.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a separate thread.

    Use `asyncio.run_coroutine_threadsafe` to run coroutines in it. The end of the block stops the
    loop and waits for its thread.
    """
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="rewards", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def end_all() -> None:
    """Cancel all other tasks of the running event loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
