"""Adapter for TRL's reward functions: `(prompts, completions, environments, **columns)`.

Each argument is a list with one entry per episode. The result is such a list, too; None in it
counts as 0. A function gets the arguments for which it has parameters, as from TRL's `GRPOTrainer`
(1.16):

- `prompts`, `completions`: conversations as lists of messages; texts if the row's prompt is text
  and there is no environment;
- `completion_ids`: tokens of the completions, including those of environments;
- `environments`: the environment objects of the episodes, after `close`; an entry is None if the
  environment is in another process;
- columns of the rows. The column that `data.train.reference` names is given as `reference`,
  unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plimsoll.errors import ConfigError
from plimsoll.reward.adapters import RewardAdapter, RewardFunction
from plimsoll.reward.references import reads_episodes

if TYPE_CHECKING:  # plans look at rewards, too, and need no NumPy
    from plimsoll.records import Trajectory

ENVIRONMENTS = "environments"
_PARAMETERS = {"prompts", "completions", "completion_ids", ENVIRONMENTS}


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a Plimsoll reward that calls a TRL reward function for a list of trajectories.

    The reward is an `async def` if the function is.
    """

    def reward(trajectories: list[Trajectory]) -> Any:
        return _numbers(function(**_arguments(function, trajectories)))

    async def reward_later(trajectories: list[Trajectory]) -> Any:
        return _numbers(await function(**_arguments(function, trajectories)))

    adapted = reward_later if inspect.iscoroutinefunction(function) else reward
    return reads_episodes(ENVIRONMENTS in inspect.signature(function).parameters)(adapted)


def _numbers(given: Any) -> Any:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    return [0.0 if value is None else value for value in given]


def _arguments(
    function: Callable[..., Any], trajectories: Sequence[Trajectory]
) -> Mapping[str, Sequence[Any]]:
    given: dict[str, Sequence[Any]] = {
        "prompts": [_prompt(t) for t in trajectories],
        "completions": [_completion(t) for t in trajectories],
        "completion_ids": [t.response_tokens.tolist() for t in trajectories],
        "reference": [t.prompt.given_reference for t in trajectories],
    }
    if transcripts := [t.transcript for t in trajectories if t.transcript is not None]:
        given[ENVIRONMENTS] = [transcript.environment for transcript in transcripts]
    names = dict.fromkeys(name for t in trajectories for name in t.prompt.columns)
    columns = {name: [t.prompt.columns.get(name) for t in trajectories] for name in names}
    given = {**columns, **given}
    parameters = inspect.signature(function).parameters.values()
    for wanted in parameters:
        open_ended = wanted.kind in (wanted.VAR_KEYWORD, wanted.VAR_POSITIONAL)
        if wanted.default is wanted.empty and not open_ended and wanted.name not in given:
            raise ConfigError(
                f"{function.__name__} takes {wanted.name!r}, and there is no such column: the rows "
                f"have {', '.join(names) or 'none'}. The column that data.train.reference names is "
                "given as 'reference': leave that out."
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {wanted.name: given[wanted.name] for wanted in parameters if wanted.name in given}


def _prompt(trajectory: Trajectory) -> str | list[Any]:
    prompt = trajectory.prompt
    return prompt.text if _is_text(trajectory) else [*prompt.messages]


def _completion(trajectory: Trajectory) -> str | list[Any]:
    if trajectory.transcript is not None:
        return [*trajectory.transcript.messages]
    text = trajectory.response_text
    return text if _is_text(trajectory) else [{"role": "assistant", "content": text}]


def _is_text(trajectory: Trajectory) -> bool:
    return trajectory.prompt.is_text and trajectory.transcript is None


ADAPTER = RewardAdapter(
    "trl_function", "reward_func", lambda names: not _PARAMETERS.isdisjoint(names), adapt
)
