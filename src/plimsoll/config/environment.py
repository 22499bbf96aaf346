"""Environments that answer what is sampled, and how far an episode may go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from plimsoll.config.base import (
    Choice,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "none"]


class EnvironmentConfig(Choice):
    """One environment, by its name or file.

    It is a name of Plimsoll's (`calculator`, `functions`, ...), a class of one's own
    (`path/to/file.py:MyEnvironment` or `my.module:MyEnvironment`), or an agent file of OpenRLHF's
    form, `agent.py`.
    """

    name: str
    """The environment's name, a class or function of one's own, or a file that ends in `.py`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class, of which one object is made for each episode."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call beside the environment's own tools, each by
    `my.module:function` or `path/to/file.py:function`, with a docstring and annotations."""
    max_turns: PositiveInt = 8
    """How often the policy speaks in an episode, at most."""
    max_tokens: PositiveInt = 2048
    """Tokens of an episode after its first prompt, sampled ones and answers together. A turn has at
    most `rollout.sampling.max_new_tokens` of them."""
    max_observation_tokens: PositiveInt = 512
    """The most tokens of one answer of the environment; a longer answer loses its middle."""
    tool_format: ToolFormat = "hermes"
    """How the model writes tool calls. hermes: `<tool_call>{...}</tool_call>`, as Qwen does; none:
    it calls no tools, and the environment reads its text."""
    describe_tools: bool = True
    """Have the chat template describe the tools in the prompt; false where the prompts do."""
    rewritten: Literal["refuse", "keep", "branch"] = "refuse"
    """What to do if the chat template changes earlier turns as a conversation goes on, such as by
    dropping earlier thoughts. keep: go on after the tokens as they were sampled. branch: go on
    after the text that the template writes, as a further sample of the same episode."""
    call_seconds: PositiveFloat = 60.0
    """The most seconds for one answer of the environment."""
    episode_seconds: PositiveFloat = 600.0
    """The most seconds for an episode; a longer one ends where it is, with what it has."""
    retries: NonNegativeInt = 1
    """Further tries of an episode whose environment failed, from its beginning."""
    process: bool = False
    """Play each episode's environment in a process of its own: one that hangs, crashes or takes too
    much memory is ended and replaced, which costs its episode alone. Else plain methods are called
    in threads."""
    memory_gib: PositiveFloat | None = None
    """GiB that it may take in its own process, besides what the loaded process holds."""
    at_once: PositiveInt | None = None
    """Episodes in flight. Default: 1.5 times as many as the engines work on at once, because
    some wait for their environments; in processes 4 for each core."""
