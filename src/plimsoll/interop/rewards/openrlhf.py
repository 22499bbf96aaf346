"""Adapter for OpenRLHF's reward functions: `reward_func(queries, prompts, labels)`.

OpenRLHF's flag `remote_rm_url` names such a function's file. A query is prompt and response
together (openrlhf/utils/agent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from plimsoll.reward.adapters import RewardAdapter, RewardFunction, check_call

if TYPE_CHECKING:  # plans look at rewards, too, and need no NumPy
    from plimsoll.records import Trajectory
    from plimsoll.reward.server_forms import Texts


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a Plimsoll reward that calls an OpenRLHF reward function.

    The reward returns the function's result, or its entry `rewards` if the result is a dict. Labels
    are the rows' references, unchanged; "" for a row without a reference.

    The reward has the option `tokenizer`: a model whose tokenizer decodes the texts from the
    actor's tokens, with the chat template, as OpenRLHF does. By default the texts have no template.
    """
    check_call(function, "OpenRLHF", "queries", "prompts", "labels")

    def reward(trajectories: list[Trajectory], *, tokenizer: str | None = None) -> Any:
        texts = [_texts(tokenizer)(trajectory) for trajectory in trajectories]
        references = [trajectory.prompt.given_reference for trajectory in trajectories]
        given = function(
            [prompt + response for prompt, response in texts],
            [prompt for prompt, _ in texts],
            ["" if reference is None else reference for reference in references],
        )
        return given.get("rewards") if isinstance(given, Mapping) else given

    return reward


@cache
def _texts(tokenizer: str | None) -> Texts:
    from plimsoll.reward.server_forms import texts_by

    return texts_by(tokenizer)


ADAPTER = RewardAdapter(
    "openrlhf_function",
    "reward_func",
    lambda names: [*names][:3] == ["queries", "prompts", "labels"],
    adapt,
)
