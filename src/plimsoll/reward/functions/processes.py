"""A reward function in processes of its own; the run goes on if the function harms a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plimsoll.config.reward import RewardConfig
from plimsoll.process.child import ChildEnded, Program
from plimsoll.process.pool import Pool
from plimsoll.process.threads import in_thread
from plimsoll.records import Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.functions.calls import await_function, call_function, is_coroutine
from plimsoll.reward.outcome import Failed, Outcome, TimeLimit


@dataclass(frozen=True)
class FunctionInProcesses:
    """Calls a reward function in processes, each time for one list of trajectories."""

    pool: Pool
    limit: TimeLimit

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return what the function gives, or failures if its process did not answer.

        Raises PlimsollError if no process can be started.
        """
        sent = [replace(t, transcript=None) for t in trajectories]
        try:
            outcomes: Sequence[Outcome] = await in_thread(
                partial(self.pool.ask, sent, self.limit.seconds)
            )
        except TimeoutError:
            failed = self.limit.failure(after="; its process was ended")
        except ChildEnded as ended:
            failed = Failed(f"'s process {ended}", ended.lines)
        else:
            return outcomes
        return [failed] * len(trajectories)


def open_in_processes(
    config: RewardConfig, batch: bool, limit: TimeLimit, size: int, stack: AsyncExitStack
) -> FunctionInProcesses:
    """Return a caller of a config's function in at most `size` processes, which end with the stack.

    `batch` says whether the function takes a list.
    """
    program = Program(
        open_function,
        what=f"The process for reward function {config.name}",
        setup=(config, batch),
        codec="plimsoll.process.pickled",
        memory_gib=config.memory_gib,
    )
    pool = Pool(program, size)
    stack.callback(pool.close)
    return FunctionInProcesses(pool, limit)


def open_function(
    setup: tuple[RewardConfig, bool],
) -> Callable[[Sequence[Trajectory]], list[Outcome]]:
    """Return what answers in the process: lists of trajectories to their outcomes."""
    config, batch = setup
    return partial(_answer, reward_function(config), batch)


def _answer(
    function: partial[Any], batch: bool, trajectories: Sequence[Trajectory]
) -> list[Outcome]:
    if is_coroutine(function):
        return asyncio.run(await_function(function, trajectories, batch))
    return call_function(function, trajectories, batch)
