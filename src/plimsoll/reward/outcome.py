"""The outcome of one reward call for one trajectory, and the sources of rewards, which call.

An outcome is a number or a failure. Outcomes hold only plain numbers and text, so they can be sent
between processes. Sources repeat failed calls. All rewards share one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol, SupportsFloat, TypeVar

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, FunctionFailed, PlimsollError, describe_error
from plimsoll.records import Trajectory

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Failed:
    """No finite number.

    Attributes:
        said: The text of the failure, which continues after the reward's name.
        lines: Lines of a traceback, or the last lines that a process wrote.
        kind: The error that stops a run.
        unanswered: Whether there was no answer in time, or none at all. Such a try takes long, so
            the first one is reported at once.
        final: Whether another try cannot mend it, such as text instead of a number.
        number: NaN or the infinite number that was given; None if it was something else.
    """

    said: str
    lines: str = ""
    kind: type[PlimsollError] = PlimsollError
    unanswered: bool = False
    final: bool = False
    number: float | None = None


Outcome = float | Failed | None
"""A finite number (or, for a `Scorer` that keeps bad numbers, any); a failure; or None if the
reward was not called, because the trajectory's group is already lost."""


@dataclass(frozen=True)
class TimeLimit:
    """The longest time of one try, and the key that sets it, such as `rewards.style.time_limit`."""

    seconds: float
    key: str

    def failure(self, before: str = "", after: str = "") -> Failed:
        """Return the failure of a try that took longer, with texts before and after the reason."""
        limit = f"its time_limit of {self.seconds:g} s ({self.key})"
        return Failed(f"{before} took longer than {limit}{after}", unanswered=True)


def number(value: object) -> Outcome:
    """Return a reward's value as a float if it is a finite number, else `Failed`."""
    given = _float(value)
    if given is None or not math.isfinite(given):
        said = f" gave {short_repr(value)} ({type(value).__name__})"
        said += ", and a reward must be a finite number"
        return Failed(said, final=True, number=given)
    return given


def numbers(values: object, wanted: int) -> list[Outcome]:
    """Return one outcome for each of `wanted` trajectories from a reward's list or array.

    All of them are `Failed` if there is no list, or if its length is wrong.
    """
    tolist = getattr(values, "tolist", None)
    given = tolist() if callable(tolist) else values
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        kind = type(values).__name__
        needed = f"a list of numbers is needed, one for each of {wanted} responses"
        return [Failed(f" gave {short_repr(values)} ({kind}), and {needed}", final=True)] * wanted
    if len(given) != wanted:
        said = f" gave {len(given)} numbers for {wanted} responses: {short_repr(given)}"
        return [Failed(said, final=True)] * wanted
    return [number(value) for value in given]


def error_outcome(error: BaseException) -> Failed:
    """Return the failure that describes an error of a user's function.

    Call this in the frame that called the function: that frame is left out of the traceback.
    """
    if isinstance(error, PlimsollError):
        said, final = f": {str(error).rstrip('.')}", isinstance(error, ConfigError)
        return Failed(said, kind=type(error), final=final)
    description, lines = describe_error(error)
    return Failed(f" raised {description}", lines, FunctionFailed)


def finite(value: object) -> float | None:
    """Return a finite number (of Python, NumPy or torch) as a float; None for anything else."""
    given = _float(value)
    return given if given is not None and math.isfinite(given) else None


def _float(value: object) -> float | None:
    """Return a number (of Python, NumPy or torch) as a float; None for anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # many numbers; or one too large
        return None


def safe_repr(value: object) -> str:
    """Return a value's `repr`; only its type and address if it has an integer too long for it."""
    try:
        return repr(value)
    except ValueError:  # an integer of over 4,300 digits
        return object.__repr__(value)


def short_repr(value: object) -> str:
    """Return a value's `repr`, cut to `SHOWN_CHARACTERS`."""
    text = safe_repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


RewardCall = Callable[[Sequence[Trajectory]], Awaitable[Sequence[Outcome]]]
"""One try: takes trajectories and returns an outcome for each, in order. A call limits its own time
and raises nothing for a failed reward."""


class RewardHosts(Protocol):
    """Processes on other nodes, too, that compute rewards.

    Attributes:
        count: The number of nodes.
    """

    count: int

    async def score(
        self, name: str, config: RewardConfig, trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Compute a reward of the config on one of the nodes, by one try; as a `RewardCall`.

        Args:
            name: The reward's name in the config.
            config: Its settings.
            trajectories: The trajectories.
        """


LONGEST_WAIT = 30.0

_T = TypeVar("_T")


OnFailedTry = Callable[[Trajectory, Failed, int], None]
"""Called after each failed try that another may mend, with the trajectory, the failure and the
number of tries that are left. An error that it raises ends the scoring."""


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

    async def score(
        self, trajectories: Sequence[Trajectory], on_failure: OnFailedTry, lost: set[int]
    ) -> list[Outcome]:
        """Return an outcome for each trajectory, in order: the last failure if all tries failed.

        Args:
            trajectories: The trajectories.
            on_failure: Called after each failed try.
            lost: The groups in which a trajectory failed all its tries, which may grow meanwhile.
                Their other trajectories are not scored any more.
        """
        size = self.size or max(1, len(trajectories))
        parts = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
        outcomes = await side_by_side(self._try(part, on_failure, lost) for part in parts)
        return [outcome for part in outcomes for outcome in part]

    async def _try(
        self, trajectories: Sequence[Trajectory], on_failure: OnFailedTry, lost: set[int]
    ) -> list[Outcome]:
        results: list[Outcome] = [None] * len(trajectories)
        async with self.places:
            for attempt in range(1 + self.retries):
                open_rows = [
                    i
                    for i, result in enumerate(results)
                    if (result is None or (isinstance(result, Failed) and not result.final))
                    and trajectories[i].group not in lost
                ]
                if not open_rows:
                    break
                if attempt:
                    await asyncio.sleep(min(LONGEST_WAIT, self.wait * 2 ** (attempt - 1)))
                outcomes = await self.call([trajectories[i] for i in open_rows])
                for i, outcome in zip(open_rows, outcomes, strict=True):
                    results[i] = outcome
                    if isinstance(outcome, Failed) and not outcome.final:
                        on_failure(trajectories[i], outcome, self.retries - attempt)
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
