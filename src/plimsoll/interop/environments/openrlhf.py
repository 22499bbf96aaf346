"""Agent files of OpenRLHF (its `agent_func_path`), played turn by turn.

A file defines `AgentExecutor`, a `MultiTurnAgentExecutor` that names an agent class with `reset`
and `step`. Each episode has a new agent. The file imports `openrlhf.utils.agent`, which need not be
installed: while the file is loaded, the classes of this module replace it.

An agent's text is appended to the conversation unchanged, without the chat template. The interface
is that of `openrlhf/utils/agent.py` in OpenRLHF 0.11.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from plimsoll.config.files import load_file
from plimsoll.environment.opening import EnvironmentAdapter, EnvironmentFactory
from plimsoll.environment.protocol import (
    Environment,
    Message,
    Observation,
    Reply,
    Step,
    await_if_needed,
)
from plimsoll.errors import ConfigError
from plimsoll.reward.outcome import finite, short_repr

PROMPT_TEXT = "prompt_text"
"""The column with the prompt as the policy reads it, after the chat template. If a row lacks it,
the column `prompt` is used, which must be text."""


class AgentExecutorBase:
    """Replaces OpenRLHF's class, whose subclasses may play complete episodes with `execute`."""

    execute: Any = None


class AgentInstanceBase:
    """Replaces OpenRLHF's class: an episode's environment. Agent files define its `step`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """Return a dict whose `observation` is the text before the first turn; here unchanged."""
        return states


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Replaces OpenRLHF's class, which holds the class of an agent."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Replaces OpenRLHF's class, so that files can import it; Plimsoll does not use it."""


STAND_INS = (
    *(AgentExecutorBase, AgentInstanceBase),
    *(MultiTurnAgentExecutor, SingleTurnAgentExecutor),
)


def stand_in_modules() -> dict[str, ModuleType]:
    """Return replacements of the OpenRLHF modules that agent files import, by module name."""
    package, utils = ModuleType("openrlhf"), ModuleType("openrlhf.utils")
    agent, logs = ModuleType("openrlhf.utils.agent"), ModuleType("openrlhf.utils.logging_utils")
    package.__path__, utils.__path__ = [], []
    vars(agent).update({stand_in.__name__: stand_in for stand_in in STAND_INS})
    vars(logs)["init_logger"] = logging.getLogger
    vars(package).update(utils=utils)
    vars(utils).update(agent=agent, logging_utils=logs)
    return {module.__name__: module for module in (package, utils, agent, logs)}


def load_agent(path: str) -> type[AgentInstanceBase]:
    """Return the agent class that the `AgentExecutor` of a file names.

    Raises ConfigError if the file cannot be loaded, or if its executor names no agent class.
    """
    kind = vars(load_file(path, stand_in_modules())).get("AgentExecutor")
    if not inspect.isclass(kind) or not issubclass(kind, AgentExecutorBase):
        raise ConfigError(
            f"{path!r} has no class AgentExecutor, which agent files of OpenRLHF define (from "
            f"openrlhf.utils.agent). An environment of another form is named with its class: "
            f"{path}:MyEnvironment."
        )
    if kind.execute is not None:
        raise ConfigError(
            f"{path!r}: AgentExecutor plays whole episodes by its own `execute`, which Plimsoll "
            f"does not call. Write it as a function with base_url and api_key that asks the "
            f"policy's endpoint for each turn, and name it as {path}:play."
        )
    try:
        executor = kind()
    except Exception as error:
        raise ConfigError(
            f"{path!r}: AgentExecutor() raised {type(error).__name__}: {error}."
        ) from error
    agent = getattr(executor, "agent_instance_cls", None)
    is_agent = inspect.isclass(agent) and issubclass(agent, AgentInstanceBase)
    if not is_agent or not hasattr(agent, "step"):
        raise ConfigError(
            f"{path!r}: AgentExecutor names no AgentInstanceBase with `reset` and `step`. One turn "
            f"with a reward needs no agent: set `rewards`."
        )
    return cast(type[AgentInstanceBase], agent)


class AgentEnvironment:
    """Wraps an agent as a Plimsoll environment of one episode.

    Args:
        agent: An object of the file's agent class.
        sampling: The `sampling_params` that the agent gets.
    """

    def __init__(self, agent: Any, sampling: Mapping[str, Any]) -> None:
        self._agent, self._sampling = agent, sampling
        self._label: object = None
        self._text = ""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Start an episode; return the text that the agent appends to the prompt.

        Raises ConfigError if the agent replaces the prompt, or the row's prompt is no text.
        """
        prompt = row.get(PROMPT_TEXT, row.get("prompt"))
        if not isinstance(prompt, str):
            raise ConfigError(
                f"An agent of OpenRLHF begins with a prompt as text, and the row has "
                f"{short_repr(prompt)}. Give the column {PROMPT_TEXT}, with the prompt after the "
                f"template."
            )
        self._label = row.get("label", row.get("reference_value"))
        states = {"observation": prompt, "label": self._label}
        self._text = _text_entry(
            await await_if_needed(self._agent.reset(states)), "observation", "reset"
        )
        if not self._text.startswith(prompt):
            raise ConfigError(
                f"The agent's reset replaced the prompt by {short_repr(self._text)}. What "
                "it gives as "
                f"`observation` must begin with the one it was given: write the beginning into the "
                f"data's prompts."
            )
        return Observation(_raw_messages(self._text.removeprefix(prompt)))

    async def step(self, reply: Reply) -> Step:
        """Return the agent's feedback text, its reward for the turn, and whether the episode ends.

        The agent's `scores` and the numbers in its `extra_logs` become figures.
        """
        sampling = SimpleNamespace(**self._sampling)
        states = {
            "observation_text": self._text,
            "action_text": reply.text,
            "label": self._label,
            "sampling_params": sampling,
        }
        answer = await await_if_needed(self._agent.step(states))
        feedback = _text_entry(answer, "environment_feedback", "step")
        reward = _number(_entry(answer, "rewards", "step"), "rewards")
        self._check_sampling(sampling, answer)
        if answer.get("environment_images"):
            raise ConfigError("The agent's step gave images, and only text can be shown.")
        self._text += reply.text + feedback
        logs = {
            str(name): finite(value) for name, value in (answer.get("extra_logs") or {}).items()
        }
        figures = {"scores": _number(answer.get("scores", reward), "scores")}
        figures |= {name: value for name, value in logs.items() if value is not None}
        done = bool(_entry(answer, "done", "step"))
        return Step(Observation(_raw_messages(feedback)), done, reward, figures)

    def _check_sampling(self, sampling: SimpleNamespace, answer: Mapping[str, Any]) -> None:
        given = answer.get("sampling_params")
        for params in (sampling, sampling if given is None else given):
            if getattr(params, "__dict__", None) != self._sampling:
                raise ConfigError(
                    f"The agent's step wants other sampling parameters for the next turn: "
                    f"{short_repr(params)}, and had "
                    f"{short_repr(SimpleNamespace(**self._sampling))}. All "
                    f"turns are sampled as rollout.sampling says: set them there."
                )


def _raw_messages(text: str) -> tuple[Message, ...]:
    return (Message("raw", text),) if text else ()


def _entry(answer: object, key: str, method: str) -> Any:
    if not isinstance(answer, Mapping) or key not in answer:
        given = ", ".join(map(str, answer)) if isinstance(answer, Mapping) else short_repr(answer)
        raise ConfigError(f"The agent's {method} must give a dict with {key!r}, and gave: {given}.")
    return answer[key]


def _text_entry(answer: object, key: str, method: str) -> str:
    value = _entry(answer, key, method)
    if not isinstance(value, str):
        given = f"{short_repr(value)} ({type(value).__name__})"
        raise ConfigError(f"The agent's {method} gave {given} as {key!r}, not text.")
    return value


def _number(value: Any, name: str) -> float:
    """Return a number of Python, NumPy or torch as a float; raise ConfigError if not finite."""
    number = finite(value)
    if number is None:
        raise ConfigError(f"The agent gave {short_repr(value)} as {name}, not a finite number.")
    return number


def open_agent_file(path: str) -> EnvironmentFactory:
    """Return a factory that makes an environment from a file's agent class for each episode."""
    agent = load_agent(path)

    def make(sampling: Mapping[str, Any] | None = None) -> Environment:
        return AgentEnvironment(agent(), sampling or {})

    return EnvironmentFactory(path, make, keeps_end=True)


ADAPTER = EnvironmentAdapter(
    "an agent file of OpenRLHF",
    "path/to/agent.py",
    lambda name: name.endswith(".py") and ":" not in name,
    open_agent_file,
)
