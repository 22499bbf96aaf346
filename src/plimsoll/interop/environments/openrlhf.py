"""Agent files of OpenRLHF (its `agent_func_path`), played turn by turn.

A file defines `AgentExecutor`, a `MultiTurnAgentExecutor` that names an agent class with `reset`
and `step`. Each episode has an agent of its own. The file imports `openrlhf.utils.agent`, which
need not be installed: while the file is loaded, the classes here stand in for it.

Agents speak text, which is appended as it is, without the chat template. Their interface is that
of OpenRLHF's `openrlhf/utils/agent.py`, at 0.11.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from plimsoll.config.files import load_file
from plimsoll.environment.adapters import EnvironmentAdapter, EnvironmentFactory
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
"""The column in which an agent's row has the prompt as the policy sees it, after the chat template.
Without it, `prompt` is taken if that is text."""


class AgentExecutorBase:
    """Stands in for OpenRLHF's: plays whole episodes by `execute`, which files may write."""

    execute: Any = None


class AgentInstanceBase:
    """Stands in for OpenRLHF's: one episode's environment, whose `step` files write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """Return `observation`, the text that the first turn follows."""
        return states


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stands in for OpenRLHF's: names the class of an agent."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Stands in for OpenRLHF's, which samples once and asks a reward; a file may import it."""


STAND_INS = (
    *(AgentExecutorBase, AgentInstanceBase),
    *(MultiTurnAgentExecutor, SingleTurnAgentExecutor),
)


def stand_in_modules() -> dict[str, ModuleType]:
    """Return the modules that agent files import, by their names."""
    package, utils = ModuleType("openrlhf"), ModuleType("openrlhf.utils")
    agent, logs = ModuleType("openrlhf.utils.agent"), ModuleType("openrlhf.utils.logging_utils")
    package.__path__, utils.__path__ = [], []
    vars(agent).update({stand_in.__name__: stand_in for stand_in in STAND_INS})
    vars(logs)["init_logger"] = logging.getLogger
    vars(package).update(utils=utils)
    vars(utils).update(agent=agent, logging_utils=logs)
    return {module.__name__: module for module in (package, utils, agent, logs)}


def load_agent(path: str) -> type[AgentInstanceBase]:
    """Return the class of the agent that a file names.

    Raises ConfigError if the file cannot be loaded, or its executor names no such class.
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
            f"policy's endpoint for each turn (docs/environments.md), and name it as {path}:play."
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
    """An agent as an environment of one episode.

    Args:
        agent: an object of the file's class.
        sampling: the agent's `sampling_params`.
    """

    def __init__(self, agent: Any, sampling: Mapping[str, Any]) -> None:
        self._agent, self._sampling = agent, sampling
        self._label: object = None
        self._text = ""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Return the agent's addition to the prompt.

        Raises ConfigError if the agent replaces the prompt.
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
        """Return the agent's feedback, and its reward for the turn.

        Its `scores` and the numbers of its `extra_logs` are figures.
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
    """Return a number of Python's, NumPy's, or torch's with one element."""
    number = finite(value)
    if number is None:
        raise ConfigError(f"The agent gave {short_repr(value)} as {name}, not a finite number.")
    return number


def open_agent_file(path: str) -> EnvironmentFactory:
    """Return what makes a file's agent an environment, for each episode."""
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
