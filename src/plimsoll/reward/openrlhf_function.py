"""A reward function in a file of OpenRLHF's form, as its `remote_rm_url` takes it:
`reward_func(queries, prompts, labels)`, where a query is prompt and response
(openrlhf/utils/agent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from plimsoll.config.base import ExistingFile
from plimsoll.config.files import load_file
from plimsoll.errors import ConfigError
from plimsoll.records import Trajectory
from plimsoll.reward.servers.formats import Texts, texts_by

FUNCTION = "reward_func"


def reward(
    trajectories: list[Trajectory], *, path: ExistingFile, tokenizer: str | None = None
) -> Any:
    """What the file's function gives; of a dict its `rewards`. Labels are the references as their
    rows have them, "" of a row without one.

    tokenizer: the model whose tokenizer writes the texts as the actor saw them, with the chat
    template, as OpenRLHF does; default: the prompt's text, followed by the response.

    Raises ConfigError where the file cannot be loaded or has no such function.
    """
    texts = [_texts(tokenizer)(one) for one in trajectories]
    given = _function(path)(
        [prompt + response for prompt, response in texts],
        [prompt for prompt, _ in texts],
        ["" if (label := t.prompt.given_reference) is None else label for t in trajectories],
    )
    return given.get("rewards") if isinstance(given, Mapping) else given


@cache
def _texts(tokenizer: str | None) -> Texts:
    return texts_by(tokenizer)


@cache
def _function(path: str) -> Callable[..., Any]:
    found = vars(load_file(path)).get(FUNCTION)
    if not callable(found):
        raise ConfigError(
            f"{path!r} has no function {FUNCTION}(queries, prompts, labels), which OpenRLHF calls. "
            f"A function of another form is chosen as path/to/file.py:my_function."
        )
    return cast(Callable[..., Any], found)
