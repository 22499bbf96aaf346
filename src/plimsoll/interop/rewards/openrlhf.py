"""Reward functions of OpenRLHF: `reward_func(queries, prompts, labels)`.

Its `remote_rm_url` takes them. A query is prompt and response (openrlhf/utils/agent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from plimsoll.reward.adapters import RewardAdapter, RewardFunction

if TYPE_CHECKING:  # plans look at rewards, too, and need no NumPy
    from plimsoll.records import Trajectory
    from plimsoll.reward.servers.formats import Texts


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Return a reward that gives what the function gives; of a dict its `rewards`.

    Labels are the references as their rows have them, "" for a row without one. Option
    `tokenizer`: the model whose tokenizer writes the texts as the actor saw them, with the chat
    template, as OpenRLHF does. Default: the prompt's text, followed by the response.
    """

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
    from plimsoll.reward.servers.formats import texts_by

    return texts_by(tokenizer)


ADAPTER = RewardAdapter(
    "openrlhf_function",
    "reward_func",
    lambda names: [*names][:3] == ["queries", "prompts", "labels"],
    adapt,
)
