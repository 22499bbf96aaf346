"""Open the environments that a config names, and make the players of their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import EnvironmentConfig, RolloutConfig
from plimsoll.data.continuation import most_calls, rewrites
from plimsoll.data.pieces import tool_name
from plimsoll.data.template import Template
from plimsoll.environment.agents import Endpoint, play_agent
from plimsoll.environment.episode import EpisodeRules
from plimsoll.environment.local import Apart, EpisodeEnvironment, LocalEnvironment, environment_pool
from plimsoll.environment.messages import ReadReply, TurnCodec
from plimsoll.environment.opening import (
    EnvironmentFactory,
    EpisodeAgent,
    load_functions,
    open_environment,
)
from plimsoll.environment.play import play
from plimsoll.environment.price import episodes_at_once, processes_of
from plimsoll.environment.tool_calls import read_reply
from plimsoll.errors import ConfigError, DataError
from plimsoll.machine.host import usable_cores
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.references import is_of_episodes
from plimsoll.reward.score import Scorer
from plimsoll.rl.episodes import Environments, Player
from plimsoll.sampler.protocol import calls_by_engine
from plimsoll.sampler.text import end_tokens, ending
from plimsoll.train.run_data import template_of

EnvironmentKind = EnvironmentFactory | EpisodeAgent
EnvironmentKinds = Mapping[str, EnvironmentKind]
_TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "A tool.", "parameters": {"type": "object"}},
}
"""An example tool, to find out how a chat template renders tools."""


def open_kinds(environments: Mapping[str, EnvironmentConfig]) -> EnvironmentKinds:
    """Return the environments that the config names, by name; nothing else is loaded yet.

    Raises ConfigError with the key of an environment that cannot be used.
    """
    kinds = {}
    for name, config in environments.items():
        try:
            kinds[name] = _kind(config)
        except ConfigError as error:
            raise ConfigError(f"environments.{name}: {error}") from error
    return kinds


def _kind(config: EnvironmentConfig) -> EnvironmentKind:
    """Return an environment; ConfigError if its options cannot be used."""
    kind = open_environment(config.name, load_functions(config.tools))
    if isinstance(kind, EpisodeAgent) and config.process:
        raise ConfigError(
            f"{config.name!r} plays whole episodes itself, and process: true is for environments "
            "that are asked turn by turn. An agent in processes of its own is `name: command`."
        )
    kind.check(config.options)
    if isinstance(kind, EnvironmentFactory) and kind.tools and config.tool_format == "none":
        raise ConfigError(
            f"{config.name!r} has tools ({', '.join(map(tool_name, kind.tools))}), and with "
            "tool_format: none no reply calls one. Say how the model writes calls: hermes, ..."
        )
    return kind


def _reader(config: EnvironmentConfig, template: Template, rollout: RolloutConfig) -> ReadReply:
    """Return the function that reads tool calls from the text of a reply."""
    if config.tool_format == "none":
        return lambda text, tools: read_reply(text, ())
    one_call = most_calls(template) == 1
    if config.tool_format == "hermes":
        return partial(read_reply, one_call=one_call)
    extract = calls_by_engine(rollout, config.tool_format, template.tokenizer)
    return partial(read_reply, extract=extract, one_call=one_call)


def _check_tools(
    name: str, kind: EnvironmentKind, config: EnvironmentConfig, template: Template
) -> None:
    """Raise ConfigError if the chat template cannot render the environment's tools or calls."""
    if not isinstance(kind, EnvironmentFactory) or not kind.tools:
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


def set_up(spec: RunSpec[RlConfig], kinds: EnvironmentKinds, scorer: Scorer) -> Environments | None:
    """Return the players of a run's episodes; None without environments.

    They run in the scorer's event loop and are closed with the scorer.

    Raises ConfigError if the chat template renders earlier turns differently as a conversation
    goes on and the config does not say what to do then, or if the template cannot render the tools
    or their calls.
    """
    if not kinds:
        return None
    endpoint = None
    if any(isinstance(kind, EpisodeAgent) for kind in kinds.values()):
        endpoint = Endpoint(spec.config.rollout.serve)
        asyncio.run_coroutine_threadsafe(endpoint.open(), scorer.loop).result()
        scorer.held.push_async_callback(endpoint.close)
    players = {
        name: _player(_rules(spec, name, kind), kind, scorer, endpoint)
        for name, kind in kinds.items()
    }
    config = spec.config
    at_once = episodes_at_once(config.environments, config.rollout, usable_cores())
    kept = not any(is_of_episodes(rule.function) for rule in scorer.rules if rule.function)
    return Environments(players, at_once, kept, asyncio.Semaphore(at_once))


def _player(
    rules: EpisodeRules, kind: EnvironmentKind, scorer: Scorer, endpoint: Endpoint | None
) -> Player:
    config = rules.config
    if isinstance(kind, EnvironmentFactory):
        return Player(rules, partial(play, _environment(config, kind, scorer), rules))
    assert endpoint is not None, "opened where there is an agent"
    return Player(rules, partial(play_agent, kind, endpoint, rules))


def _environment(
    config: EnvironmentConfig, kind: EnvironmentFactory, scorer: Scorer
) -> Callable[[], EpisodeEnvironment]:
    if not config.process:
        return partial(LocalEnvironment, partial(kind.make, **config.options), config.call_seconds)
    pool = environment_pool(config, processes_of(config, usable_cores()))
    scorer.held.callback(pool.close)
    return partial(Apart, pool, config.call_seconds)


def _rules(spec: RunSpec[RlConfig], name: str, kind: EnvironmentKind) -> EpisodeRules:
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
    known = end_tokens(model.path, template.tokenizer, model.trust_remote_code)
    ends = ending(template.tokenizer, known, spec.config.rollout.sampling.stop).tokens
    read = _reader(config, template, spec.config.rollout)
    keeps_end = isinstance(kind, EnvironmentFactory) and kind.keeps_end
    codec = TurnCodec(template, ends, read, config.max_observation_tokens, keeps_end)
    return EpisodeRules(name, config, codec, spec.data.max_tokens)
