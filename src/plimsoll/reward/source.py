"""Something that scores trajectories, how it is tried again where it fails, and the event loop in
which all rewards of a run are waited for, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, Unasked

Call = Callable[[Sequence[Trajectory]], Awaitable[Sequence[Outcome]]]
"""One try: an outcome for each trajectory, in order. It ends within a time limit of its own and
raises nothing."""

LONGEST_WAIT = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Watch:
    """Who hears of failures while trajectories are scored, and what is not worth scoring any more.

    Attributes:
        failed: called after each try of a trajectory that failed, with the number of tries that
            are left. What it raises ends the scoring.
        lost: groups that have lost a trajectory for good. Nothing more of them is asked.
    """

    failed: Callable[[Trajectory, Failed, int], None]
    lost: set[int]


@dataclass(frozen=True)
class Source:
    """Scores trajectories by calls that are made side by side, and made again where they fail.

    Attributes:
        call: one try.
        size: how many trajectories a call takes at most; None for any number.
        retries: further tries for the trajectories that failed.
        wait: seconds before the first of these; twice as many before each one after it, up to
            LONGEST_WAIT.
        places: how many calls are made at the same time. A call that fails keeps its place until
            its last try. So what is asked for first is settled first, and a source that never
            answers is known after a few calls instead of after all.
    """

    call: Call
    size: int | None
    retries: int
    wait: float
    places: asyncio.Semaphore

    async def score(self, trajectories: Sequence[Trajectory], watch: Watch) -> list[Outcome]:
        """Return an outcome for each trajectory, in order; a failure is the last one."""
        size = self.size or max(1, len(trajectories))
        parts = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
        tried = await side_by_side(self._tried(part, watch) for part in parts)
        return [one for part in tried for one in part]

    async def _tried(self, trajectories: Sequence[Trajectory], watch: Watch) -> list[Outcome]:
        found: list[Outcome] = [Unasked()] * len(trajectories)
        async with self.places:
            for attempt in range(1 + self.retries):
                asked = [
                    i
                    for i, one in enumerate(found)
                    if isinstance(one, Failed | Unasked) and trajectories[i].group not in watch.lost
                ]
                if not asked:
                    break
                if attempt:
                    await asyncio.sleep(min(LONGEST_WAIT, self.wait * 2 ** (attempt - 1)))
                outcomes = await self.call([trajectories[i] for i in asked])
                for i, outcome in zip(asked, outcomes, strict=True):
                    found[i] = outcome
                    if isinstance(outcome, Failed):
                        watch.failed(trajectories[i], outcome, self.retries - attempt)
        return found


async def side_by_side(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results, in order. Where one raises, the others are ended, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that consumes coroutines handed to it by `asyncio.run_coroutine_threadsafe`, waits for
    what they wait for, and gives their results through futures. The end of
    the block ends it, and its thread is waited for."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=_run, args=(loop,), name="rewards", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def end_all() -> None:
    """Cancel all other work of the loop that this is awaited in, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
