"""Adapter for TRL's reward functions: `(prompts, completions, environments, **columns)`.

Each argument is a list with one entry per episode. The result is such a list, too; None in it
counts as 0. A function gets the arguments for which it has parameters, as from TRL's `GRPOTrainer`
(1.16):

- `prompts`, `completions`: conversations as lists of messages; texts if the row's prompt is text
  and there is no environment;
- `completion_ids`: tokens of the completions, including those of environments;
- `environments`: the environment objects of the episodes, after `close`; an entry is None if the
  environment is in another process;
- every column of the rows by its name. Unless the rows have such a column, `reference` is the
  value of the column that `data.train.reference` names, unchanged;
- `trainer_state`: it has `global_step`, the version of the weights that sampled;
- `log_metric`, `log_extra`: functions that keep nothing. Metrics are parts of the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from plimsoll.errors import ConfigError
from plimsoll.reward.adapters import RewardAdapter, RewardFunction
from plimsoll.reward.references import reads_episodes, takes_columns

if TYPE_CHECKING:  # plans look at rewards, too, and need no NumPy
    from plimsoll.records import Trajectory

ENVIRONMENTS = "environments"
_PARAMETERS = {"prompts", "completions", "completion_ids", ENVIRONMENTS}
_BESIDE = {"reference", "trainer_state", "log_metric", "log_extra"}


@dataclass(frozen=True)
class TrainerState:
    """What a reward sees of TRL's `TrainerState`."""

    global_step: int
    """The version of the weights that sampled: 0 before the first optimizer step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trainer_state has no {name!r} here: Plimsoll gives its global_step alone"
        )


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a Plimsoll reward that calls a TRL reward function for a list of trajectories.

    The reward is an `async def` if the function is.
    """

    def reward(trajectories: list[Trajectory]) -> Any:
        return _numbers(function(**_arguments(function, trajectories)))

    async def reward_later(trajectories: list[Trajectory]) -> Any:
        return _numbers(await function(**_arguments(function, trajectories)))

    adapted = reward_later if inspect.iscoroutinefunction(function) else reward
    columns = [name for name in _needed(function) if name not in _PARAMETERS | _BESIDE]
    of_episodes = reads_episodes(ENVIRONMENTS in inspect.signature(function).parameters)
    return takes_columns(columns)(of_episodes(adapted))


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that must be given."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


def _keep_nothing(name: str, value: object) -> None:
    """Take what a function logs, as TRL's `log_metric` and `log_extra` do."""


def _numbers(given: Any) -> Any:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    return [0.0 if value is None else value for value in given]


def _arguments(
    function: Callable[..., Any], trajectories: Sequence[Trajectory]
) -> Mapping[str, Any]:
    rows = [{**t.prompt.named, **t.prompt.columns} for t in trajectories]
    names = dict.fromkeys(name for row in rows for name in row)
    versions = [int(t.weight_versions.max(initial=0)) for t in trajectories]
    given: dict[str, Any] = {
        "reference": [t.prompt.given_reference for t in trajectories],
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": [_prompt(t) for t in trajectories],
        "completions": [_completion(t) for t in trajectories],
        "completion_ids": [t.response_tokens.tolist() for t in trajectories],
        "trainer_state": TrainerState(max(versions, default=0)),
        "log_metric": _keep_nothing,
        "log_extra": _keep_nothing,
    }
    if transcripts := [t.transcript for t in trajectories if t.transcript is not None]:
        given[ENVIRONMENTS] = [transcript.environment for transcript in transcripts]
    if missing := [name for name in _needed(function) if name not in given]:
        raise ConfigError(
            f"{function.__name__} takes {missing[0]!r}, and there is no such column: the rows have "
            f"{', '.join(names) or 'none'}. Give the parameter a default, or add the column."
        )
    parameters = inspect.signature(function).parameters.values()
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
