"""Play episodes with agents: code that drives the episode and asks the policy for each turn.

An agent is a function `play(row, base_url, api_key)`, plain or `async`, that calls the policy
through the OpenAI-compatible endpoint there (endpoint.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plimsoll.environment.adapters import EpisodeAgent
from plimsoll.environment.agents.endpoint import Endpoint
from plimsoll.environment.episode import Episode, EpisodePolicy, EpisodeRules
from plimsoll.environment.local import call_own_code
from plimsoll.environment.results import EnvironmentFailed, EpisodeReward, read_reward
from plimsoll.records import Prompt, Trajectory, Transcript
from plimsoll.reward.outcome import Failed


@dataclass(frozen=True)
class AgentResult:
    """A reward with figures; an agent may return this instead of the reward alone."""

    reward: EpisodeReward
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the episode, by name."""


@dataclass(frozen=True)
class ServedAgent:
    """An agent of a run, with its options and the endpoint that answers its calls."""

    agent: EpisodeAgent
    options: Mapping[str, Any]
    endpoint: Endpoint

    async def play(self, episode: Episode, row: Mapping[str, Any]) -> AgentResult:
        """Have the agent play an episode; return its checked reward and its figures.

        Raises EnvironmentFailed if the agent raises, or if its result is not a reward.
        """
        function = self.agent.play
        with self.endpoint.serving(episode) as key:
            address = {"base_url": self.endpoint.base_url, "api_key": key}
            call = partial(function, row, **address, **self.options)
            given = await call_own_code(call, inspect.iscoroutinefunction(function))
        result = given if isinstance(given, AgentResult) else AgentResult(given)
        reward = read_reward(result.reward, function.__name__)
        if isinstance(reward, Failed):
            raise EnvironmentFailed(reward)
        return replace(result, reward=reward)


async def play_agent(
    agent: ServedAgent,
    rules: EpisodeRules,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: EpisodePolicy,
) -> Trajectory:
    """Have the agent play an episode; return the trajectory.

    An episode that ran out of turns, room or time may have no reward from the agent.
    Raises EnvironmentFailed if the agent fails, or asks for no turn.
    """
    episode, result = Episode(rules, prompt, policy), AgentResult(None)
    try:
        async with asyncio.timeout(rules.config.episode_seconds):
            result = await agent.play(episode, episode.row(group_seed))
    except TimeoutError:
        episode.reason = "time"
    except EnvironmentFailed:
        if episode.reason not in ("turns", "length"):  # an agent may not expect to be refused
            raise
    finally:
        episode.end()
    if not episode.branches:
        raise EnvironmentFailed(Failed(f" asked for no turn, and ended by: {episode.reason}"))
    trajectory = episode.trajectory(sample_index, result.reward, result.figures)
    turns = [turn for branch in episode.branches for turn in branch.turns]
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return replace(trajectory, transcript=Transcript(None, messages))
