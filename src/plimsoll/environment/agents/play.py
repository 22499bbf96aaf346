"""Agents: they play a whole episode by themselves, and ask the policy for each turn (session.py).

An agent is a function `play(row, base_url, api_key)`, plain or `async`, that calls the policy
through the OpenAI-compatible endpoint there (endpoint.py), and gives the episode's reward or None;
or an executor of OpenRLHF (agents/executor.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plimsoll.environment.agents.endpoint import Endpoint
from plimsoll.environment.agents.session import Session
from plimsoll.environment.calls import EnvironmentFailed, Rewarded, rewarded
from plimsoll.environment.conversation import ended
from plimsoll.environment.episode import Policy, Table, counted_turns, row_of
from plimsoll.environment.seat import called
from plimsoll.records import Prompt, Trajectory, Transcript
from plimsoll.reward.outcome import Failed


@dataclass(frozen=True)
class Played:
    """What an agent says of an episode that it has played. truncated: it was cut off."""

    reward: Rewarded
    figures: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


Agent = Callable[[Session, Mapping[str, Any]], Awaitable[Played]]
"""(session, row): plays an episode. Raises EnvironmentFailed where it fails."""


@dataclass(frozen=True)
class ServedAgent:
    """An `Agent` of a function that calls the endpoint."""

    play: Callable[..., Any]
    options: Mapping[str, Any]
    endpoint: Endpoint

    async def __call__(self, session: Session, row: Mapping[str, Any]) -> Played:
        with self.endpoint.serving(session) as key:
            address = {"base_url": self.endpoint.base_url, "api_key": key}
            work = partial(self.play, row, **address, **self.options)
            found = rewarded(
                await called(work, inspect.iscoroutinefunction(self.play)), self.play.__name__
            )
        if isinstance(found, Failed):
            raise EnvironmentFailed(found)
        return Played(found)


async def play_agent(
    agent: Agent,
    table: Table,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: Policy,
) -> Trajectory:
    """An episode. One that ran out of turns, room or time has no reward but what `rewards` give.

    Raises EnvironmentFailed where the agent fails, or asks for no turn.
    """
    session, played = Session(table, prompt, policy), Played(None)
    try:
        async with asyncio.timeout(table.config.episode_seconds):
            played = await agent(session, row_of(prompt, group_seed, table.speech))
    except TimeoutError:
        session.reason = "time"
    except EnvironmentFailed:
        if session.reason not in ("turns", "length"):  # an agent may not expect to be refused
            raise
    finally:
        session.end()
    if not session.branches:
        raise EnvironmentFailed(Failed(f" asked for no turn, and ended by: {session.reason}"))
    reason = "length" if played.truncated else session.reason
    figures = {**counted_turns(session.branches), **session.figures, **played.figures}
    turns = [turn for branch in session.branches for turn in branch.turns]
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    found = ended(session.branches, sample_index, reason, played.reward, figures)
    return replace(found, transcript=Transcript(None, messages))
