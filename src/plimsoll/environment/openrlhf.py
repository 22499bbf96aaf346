"""Agent files of OpenRLHF (its `agent_func_path`), as they are.

A file defines `AgentExecutor`. One of `MultiTurnAgentExecutor` names an agent with `reset` and
`step`, which becomes an environment; one that writes `execute` itself plays whole episodes
(agents/executor.py). Such a file imports `openrlhf.utils.agent`, which need not be installed:
while it is loaded, the classes here stand in for it.

Agents speak text: what they say is appended as it is, without the chat template. Their interface is
that of OpenRLHF's `openrlhf/utils/agent.py`, at 0.11.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from plimsoll.config.files import load_file
from plimsoll.environment.protocol import Message, Observation, Reply, Step, settled
from plimsoll.environment.schemas import shown
from plimsoll.errors import ConfigError

PROMPT_TEXT = "prompt_text"
"""The column in which an agent's row has the prompt as the policy sees it, after the chat template;
without it, `prompt` is taken where that is text."""


class AgentExecutorBase:
    """Stands in for OpenRLHF's: plays whole episodes."""

    async def execute(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """To be written by the agent file."""
        raise NotImplementedError(f"{type(self).__name__} has no method `execute`")


class AgentInstanceBase:
    """Stands in for OpenRLHF's: one episode's environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """Gives `observation`, the text that the first turn follows."""
        return states

    async def step(self, states: dict[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """To be written by the agent file."""
        raise NotImplementedError(f"{type(self).__name__} has no method `step`")


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stands in for OpenRLHF's: names the class of an agent."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Stands in for OpenRLHF's, which samples once and asks a reward: it may be imported."""

    def __init__(self, remote_rm_url: object = None) -> None:
        self.remote_rm_url = remote_rm_url


def stand_ins() -> dict[str, ModuleType]:
    """The modules that agent files import."""
    package, utils = ModuleType("openrlhf"), ModuleType("openrlhf.utils")
    agent, logs = ModuleType("openrlhf.utils.agent"), ModuleType("openrlhf.utils.logging_utils")
    package.__path__, utils.__path__ = [], []
    for own in (
        *(AgentExecutorBase, AgentInstanceBase),
        *(MultiTurnAgentExecutor, SingleTurnAgentExecutor),
    ):
        setattr(agent, own.__name__, own)
    vars(logs)["init_logger"] = logging.getLogger
    vars(package).update(utils=utils)
    vars(utils).update(agent=agent, logging_utils=logs)
    return {module.__name__: module for module in (package, utils, agent, logs)}


def load_agent(path: str) -> type[AgentInstanceBase] | AgentExecutorBase:
    """What an agent file is of: the class of its agent; or its executor, which all episodes share.

    Raises ConfigError where the file cannot be loaded, or has neither.
    """
    found = vars(load_file(path, stand_ins())).get("AgentExecutor")
    if not inspect.isclass(found) or not issubclass(found, AgentExecutorBase):
        raise ConfigError(
            f"{path!r} has no class AgentExecutor, which agent files of OpenRLHF define (from "
            f"openrlhf.utils.agent). An environment of another kind is named with its class: "
            f"{path}:MyEnvironment."
        )
    try:
        executor = found()
    except Exception as error:
        raise ConfigError(
            f"{path!r}: AgentExecutor() raised {type(error).__name__}: {error}."
        ) from error
    kinds = (AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor)
    if found.execute not in [kind.execute for kind in kinds]:
        return executor
    agent = getattr(executor, "agent_instance_cls", None)
    if not inspect.isclass(agent) or not issubclass(agent, AgentInstanceBase):
        raise ConfigError(
            f"{path!r}: AgentExecutor has no `execute`, and names no AgentInstanceBase with "
            f"`reset` and `step`. For one turn with a reward no agent is needed: set `rewards`."
        )
    return agent


class OpenRlhfEnvironment:
    """An environment (`protocol.Environment`) of an agent. sampling: what it finds as attributes of
    `sampling_params`; an agent that changes them is refused, as nothing would follow it.

    A reply's text is to have its special tokens, as agents look for the end of turn.
    """

    def __init__(self, agent: AgentInstanceBase, sampling: Mapping[str, Any]) -> None:
        self._agent, self._sampling = agent, dict(sampling)
        self._label: object = None
        self._text = ""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """What the agent adds to the prompt. Raises ConfigError where it replaces it."""
        prompt = row.get(PROMPT_TEXT, row.get("prompt"))
        if not isinstance(prompt, str):
            raise ConfigError(
                f"An agent of OpenRLHF begins with a prompt as text, and the row has "
                f"{shown(prompt)}: the column {PROMPT_TEXT} is to have it, after the template."
            )
        self._label = row.get("label", row.get("reference_value"))
        begun = await settled(self._agent.reset({"observation": prompt, "label": self._label}))
        self._text = _entry(begun, "observation", "reset", str)
        if not self._text.startswith(prompt):
            raise ConfigError(
                f"The agent's reset replaced the prompt by {shown(self._text)}. What it gives as "
                f"`observation` must begin with the one it was given: write the beginning into the "
                f"data's prompts."
            )
        return Observation(_raw(self._text.removeprefix(prompt)))

    async def step(self, reply: Reply) -> Step:
        """What the agent feeds back, and its reward for the turn. Its `scores` and the numbers of
        its `extra_logs` are figures."""
        sampling = SimpleNamespace(**self._sampling)
        states = {
            "observation_text": self._text,
            "action_text": reply.text,
            "label": self._label,
            "sampling_params": sampling,
        }
        found = await settled(self._agent.step(states))
        feedback = _entry(found, "environment_feedback", "step", str)
        reward = number_of(_entry(found, "rewards", "step", object), "rewards")
        self._check_kept(sampling, found)
        if found.get("environment_images"):
            raise ConfigError("The agent's step gave images, and only text can be shown.")
        self._text += reply.text + feedback
        score = number_of(found.get("scores", reward), "scores")
        figures = {"scores": score, **numbers_of(found.get("extra_logs") or {})}
        done = bool(_entry(found, "done", "step", object))
        return Step(Observation(_raw(feedback)), done, reward, figures)

    def _check_kept(self, sampling: SimpleNamespace, found: Mapping[str, Any]) -> None:
        given = found.get("sampling_params")
        for params in (sampling, sampling if given is None else given):
            now = getattr(params, "__dict__", None)
            if now != self._sampling:
                raise ConfigError(
                    f"The agent's step wants other sampling parameters for the next turn: "
                    f"{shown(params)}, and had {shown(SimpleNamespace(**self._sampling))}. All "
                    f"turns are sampled as rollout.sampling says: set them there."
                )


def _raw(text: str) -> tuple[Message, ...]:
    return (Message("raw", text),) if text else ()


def _entry(found: object, key: str, method: str, kind: type) -> Any:
    if not isinstance(found, Mapping) or key not in found:
        has = ", ".join(map(str, found)) if isinstance(found, Mapping) else shown(found)
        raise ConfigError(f"The agent's {method} must give a dict with {key!r}, and gave: {has}.")
    if not isinstance(found[key], kind):
        said = f"{shown(found[key])} ({type(found[key]).__name__})"
        raise ConfigError(f"The agent's {method} gave {said} as {key!r}, not text.")
    return found[key]


def number_of(value: Any, name: str) -> float:
    """Of Python's, NumPy's or torch's with one element."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"The agent gave {shown(value)} as {name}, no number.") from error
    if not math.isfinite(found):
        raise ConfigError(f"The agent gave {found} as {name}, no finite number.")
    return found


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers."""
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = number_of(value, name)
        except ConfigError:
            continue
    return found
