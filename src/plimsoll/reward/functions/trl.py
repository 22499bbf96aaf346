"""Reward functions of TRL's form, as they are: `(prompts, completions, environments, **columns)`.

Each argument is a list with one entry for each episode, and so is what they give; None there counts
nothing. What they may take, by name, is what TRL's `GRPOTrainer` hands over (1.16):

- `prompts`, `completions`: conversations as lists of messages, as chat templates take them; texts
  where the row holds its prompt as text and no environment plays;
- `completion_ids`: tokens, those of the environment too;
- `environments`: the objects that the episodes were played with, after their `close`, if there
  are environments; None of one in another process;
- columns of the rows. The one that `data.train.reference` names is `reference`, as the row has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from plimsoll.errors import ConfigError

if TYPE_CHECKING:  # plans look at rewards, too, and need no NumPy
    from plimsoll.records import Trajectory

ENVIRONMENTS = "environments"
_OWN = ("prompts", "completions", "completion_ids", ENVIRONMENTS)
_TAKES = "takes_of_trls_form"


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward of a list of trajectories; where no parameter has a name of TRL's, the function as
    it is."""
    names = (*inspect.signature(function).parameters,)
    if {*_OWN}.isdisjoint(names):
        return function

    def scored(trajectories: list[Trajectory]) -> Any:
        return _numbers(function(**_arguments(function, trajectories)))

    async def scored_later(trajectories: list[Trajectory]) -> Any:
        return _numbers(await function(**_arguments(function, trajectories)))

    found = scored_later if inspect.iscoroutinefunction(function) else scored
    setattr(found, _TAKES, names)
    return found


def taken(reward: partial[Any]) -> tuple[str, ...]:
    """The parameters of a function of TRL's form; none of another form."""
    names: tuple[str, ...] = getattr(reward.func, _TAKES, ())
    return names


def _numbers(given: Any) -> Any:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    return [0.0 if one is None else one for one in given]


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
        given[ENVIRONMENTS] = [one.environment for one in transcripts]
    names = dict.fromkeys(name for t in trajectories for name in t.prompt.columns)
    columns = {name: [t.prompt.columns.get(name) for t in trajectories] for name in names}
    given = {**columns, **given}
    parameters = inspect.signature(function).parameters.values()
    for one in parameters:
        wanted = one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if wanted and one.name not in given:
            raise ConfigError(
                f"{function.__name__} takes {one.name!r}, and there is no such column: the rows "
                f"have {', '.join(names) or 'none'}. One that data.train.reference names comes as "
                "'reference': leave that out."
            )
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return given
    return {one.name: given[one.name] for one in parameters if one.name in given}


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
