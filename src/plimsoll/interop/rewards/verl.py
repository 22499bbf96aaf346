"""Adapter for verl's rewards: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

verl's `custom_reward_function` names such a function (verl/workers/reward_manager/naive.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plimsoll.environment.protocol import await_if_needed
from plimsoll.reward.adapters import RewardAdapter, RewardFunction, check_call

if TYPE_CHECKING:
    from plimsoll.records import Trajectory


_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a Plimsoll reward that calls a verl reward function.

    The reward returns the function's result, or its entry `score` if the result is a dict.
    `data_source` is the row's source. `ground_truth` is the row's reference, unchanged ("" without
    one). `extra_info` is the row's column of this name. The function may be an `async def`.
    """
    check_call(function, "verl", **dict.fromkeys(_GIVEN, ""))

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
