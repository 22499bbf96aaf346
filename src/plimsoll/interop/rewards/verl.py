"""Reward functions of verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

Its `custom_reward_function` takes them (verl/workers/reward_manager/naive.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plimsoll.environment.protocol import await_if_needed
from plimsoll.reward.adapters import RewardAdapter, RewardFunction

if TYPE_CHECKING:
    from plimsoll.records import Trajectory


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a reward that gives what the function gives; of a dict its `score`.

    `data_source` is the row's source, `ground_truth` its reference as the row has it ("" for a row
    without one), and `extra_info` its column of this name. The function may be an `async def`.
    """

    def reward(trajectory: Trajectory) -> Any:
        prompt = trajectory.prompt
        given = function(
            data_source=prompt.source,
            solution_str=trajectory.response_text,
            ground_truth="" if prompt.given_reference is None else prompt.given_reference,
            extra_info=prompt.columns.get("extra_info"),
        )
        if inspect.isawaitable(given):
            given = asyncio.run(await_if_needed(given))
        return given.get("score") if isinstance(given, Mapping) else given

    return reward


ADAPTER = RewardAdapter(
    "verl_function",
    "compute_score",
    {"data_source", "solution_str", "ground_truth"}.issubset,
    adapt,
)
