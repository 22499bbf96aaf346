"""The environments of a config, from their names to tables that episodes are played at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data.continuation import most_calls, rewrites
from plimsoll.data.pieces import tool_name
from plimsoll.data.template import Template
from plimsoll.environment.agents.endpoint import Endpoint
from plimsoll.environment.agents.executor import ExecutorAgent
from plimsoll.environment.agents.play import Agent, ServedAgent, play_agent
from plimsoll.environment.apart import Apart, Setup, processes
from plimsoll.environment.episode import Table, play
from plimsoll.environment.opening import AgentFunction, Factory, opened, opened_functions
from plimsoll.environment.openrlhf import AgentExecutorBase
from plimsoll.environment.price import episodes_at_once, processes_of
from plimsoll.environment.seat import Here, Seat
from plimsoll.environment.speech import Read, Speech
from plimsoll.environment.tool_calls import read_reply
from plimsoll.environment.verifiers.agent import VerifiersAgent
from plimsoll.environment.verifiers.process import VerifiersEnvironment
from plimsoll.errors import ConfigError, DataError
from plimsoll.machine.host import usable_cores
from plimsoll.reward.score import Scorer
from plimsoll.rl.episodes import Environments, Player
from plimsoll.rollout.text import end_tokens
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.run_data import template_of

Kind = Factory | AgentFunction | AgentExecutorBase | VerifiersEnvironment
Kinds = Mapping[str, Kind]
_TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "A tool.", "parameters": {"type": "object"}},
}
"""Any, to see what a chat template does with one."""


def open_kinds(environments: Mapping[str, EnvironmentConfig]) -> Kinds:
    """What the config names, found and looked at, before anything is loaded.

    Raises ConfigError, naming the key, for what cannot be used.
    """
    found = {}
    for name, config in environments.items():
        try:
            found[name] = _kind(config)
        except ConfigError as error:
            raise ConfigError(f"environments.{name}: {error}") from error
    return found


def _kind(config: EnvironmentConfig) -> Kind:
    found = opened(config.name, opened_functions(config.tools))
    if not isinstance(found, Factory) and config.process:
        raise ConfigError(
            f"{config.name!r} plays whole episodes itself, and process: true is for environments "
            "that are asked turn by turn. An agent in processes of its own is `name: command`."
        )
    if isinstance(found, AgentExecutorBase):
        if config.options:
            raise ConfigError(f"{config.name!r} is an executor of OpenRLHF: it takes no options.")
        return found
    found.check(config.options)
    if isinstance(found, Factory) and found.tools and config.tool_format == "none":
        raise ConfigError(
            f"{config.name!r} has tools ({', '.join(map(tool_name, found.tools))}), and with "
            "tool_format: none no reply calls one. Say how the model writes calls: hermes, ..."
        )
    return found


def _reader(config: EnvironmentConfig, template: Template) -> Read:
    """How a reply's tool calls are found in its text."""
    if config.tool_format == "none":
        return lambda text, tools: read_reply(text, ())
    one_call = most_calls(template) == 1
    if config.tool_format == "hermes":
        return partial(read_reply, one_call=one_call)
    from plimsoll.rollout.vllm_tools import vllm_extract  # vLLM takes seconds

    extract = vllm_extract(config.tool_format, template.tokenizer)
    return partial(read_reply, extract=extract, one_call=one_call)


def _check_tools(name: str, kind: Kind, config: EnvironmentConfig, template: Template) -> None:
    """ConfigError for a chat template that cannot tell of the environment's tools, or of calls."""
    if not isinstance(kind, Factory) or not kind.tools:
        return
    if config.describe_tools:
        try:
            template.with_tools(kind.tools).render_prompt([{"role": "user", "content": "?"}])
        except DataError as error:
            raise ConfigError(
                f"environments.{name}: a conversation {error}. Or write environments.{name}."
                "describe_tools: false, where the prompts tell of the tools themselves."
            ) from error
    if most_calls(template) == 0:
        raise ConfigError(
            f"environments.{name}: the policy is to call tools, and the chat template of "
            f"{template.tokenizer.name_or_path} takes no calls with their results. Set "
            "data.chat_template to a template that does."
        )


def set_up(spec: RunSpec[RlConfig], kinds: Kinds, scorer: Scorer) -> Environments | None:
    """What episodes are played with, in the scorer's event loop, and ended with it; None where the
    config has no environments.

    Raises ConfigError for a chat template that writes earlier turns anew, where the config does not
    say what to do then; and for one that does not take what an environment's tools need.
    """
    if not kinds:
        return None
    endpoint = None
    if any(isinstance(kind, AgentFunction) for kind in kinds.values()):
        endpoint = Endpoint(spec.config.rollout.serve)
        asyncio.run_coroutine_threadsafe(endpoint.open(), scorer.loop).result()
        scorer.held.push_async_callback(endpoint.close)
    players = {
        name: _player(_table(spec, name, kind), kind, scorer, endpoint)
        for name, kind in kinds.items()
    }
    config = spec.config
    at_once = episodes_at_once(config.environments, config.rollout, usable_cores())
    return Environments(players, at_once, scorer.loop)


def _player(table: Table, kind: Kind, scorer: Scorer, endpoint: Endpoint | None) -> Player:
    config = table.config
    if isinstance(kind, Factory):
        return Player(table, partial(play, _seat(config, kind, scorer), table))
    agent: Agent
    if isinstance(kind, AgentFunction):
        assert endpoint is not None, "opened where there is one"
        agent = ServedAgent(kind.play, config.options, endpoint)
    elif isinstance(kind, VerifiersEnvironment):
        process = kind.process(config.options)
        scorer.held.push_async_callback(process.close)
        agent = VerifiersAgent(process, config.call_seconds)
    else:
        agent = ExecutorAgent(kind)
    return Player(table, partial(play_agent, agent, table))


def _seat(config: EnvironmentConfig, kind: Factory, scorer: Scorer) -> Callable[[], Seat]:
    if not config.process:
        return partial(Here, partial(kind.make, **config.options), config.call_seconds)
    memory = None if config.memory_gib is None else int(config.memory_gib * 2**30)
    setup = Setup(config.name, config.options, config.tools, memory)
    children = processes(setup, processes_of(config, usable_cores()))
    scorer.held.push_async_callback(children.close)
    return partial(Apart, children, config.call_seconds)


def _table(spec: RunSpec[RlConfig], name: str, kind: Kind) -> Table:
    config, model = spec.config.environments[name], spec.actor.model
    template = template_of(spec, spec.data.chat_template)
    changed = rewrites(template, () if config.tool_format == "none" else (_TOOL,))
    if changed is not None and config.rewritten == "refuse":
        raise ConfigError(
            f"environments.{name}: the chat template of {model.path} writes earlier turns anew as "
            f"a conversation goes on: {changed}. The policy would then read other tokens than it "
            f"was sampled after. Write environments.{name}.rewritten: keep, to go on after what "
            "was sampled as it was sampled, or branch, to go on after what the template writes, as "
            "a further sample; or set data.chat_template to a template that does not."
        )
    _check_tools(name, kind, config, template)
    ends = end_tokens(model.path, template.tokenizer, model.trust_remote_code)
    read = _reader(config, template)
    keeps_end = isinstance(kind, Factory) and kind.keeps_end
    speech = Speech(template, ends, read, config.max_observation_tokens, keeps_end)
    return Table(name, config, speech, spec.data.max_tokens)
