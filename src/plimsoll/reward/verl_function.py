"""A reward function in a file of verl's form, as its `custom_reward_function` takes it:
`compute_score(data_source, solution_str, ground_truth, extra_info)`
(verl/workers/reward_manager/naive.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, cast

from plimsoll.config.base import ExistingFile
from plimsoll.config.files import load_file
from plimsoll.errors import ConfigError
from plimsoll.records import Trajectory


def reward(trajectory: Trajectory, *, path: ExistingFile, function: str = "compute_score") -> Any:
    """What the file's function gives of a response; of a dict its `score`. The source of the row
    is its `data_source`, the reference as the row has it its `ground_truth` ("" of a row without
    one), and the column `extra_info` goes along. It may be an `async def`.

    Raises ConfigError where the file cannot be loaded or has no such function.
    """
    row = trajectory.prompt
    given = _function(path, function)(
        data_source=row.source,
        solution_str=trajectory.response_text,
        ground_truth="" if row.given_reference is None else row.given_reference,
        extra_info=row.columns.get("extra_info"),
    )
    if inspect.isawaitable(given):
        given = asyncio.run(_awaited(given))
    return given.get("score") if isinstance(given, Mapping) else given


async def _awaited(given: Awaitable[Any]) -> Any:
    return await given


@cache
def _function(path: str, name: str) -> Callable[..., Any]:
    found = vars(load_file(path)).get(name)
    if not callable(found):
        raise ConfigError(
            f"{path!r} has no function {name}(data_source, solution_str, ground_truth, "
            f"extra_info), which verl calls. A function of another form is chosen as "
            f"path/to/file.py:my_function."
        )
    return cast(Callable[..., Any], found)
