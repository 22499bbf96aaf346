"""Groups of episodes, side by side: thousands may be in flight against the engines' batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import ENVIRONMENT
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.calls import EnvironmentFailed
from plimsoll.environment.episode import Policy, Table
from plimsoll.environment.rounds import Rounds
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.outcome import Failed
from plimsoll.reward.rule import cut
from plimsoll.reward.score import RewardFailure, Scored
from plimsoll.reward.source import side_by_side
from plimsoll.rollout.protocol import Ask, derive_seeds

_ATTEMPT = 7_919
"""Between the seeds of two tries of an episode."""


@dataclass(frozen=True)
class Player:
    """play: an episode at the table: (prompt, seed of the group, number in the group, policy)."""

    table: Table
    play: Callable[[Prompt, int, int, Policy], Awaitable[Trajectory]]


@dataclass(frozen=True)
class Environments:
    """Those of a run. players: by their names in the config. at_once: episodes in flight. loop: in
    which they are played."""

    players: Mapping[str, Player]
    at_once: int
    loop: asyncio.AbstractEventLoop

    def player_of(self, prompt: Prompt) -> Player:
        """The one that a prompt's row names; the only one, where there is one."""
        if len(self.players) == 1:
            return next(iter(self.players.values()))
        return self.players[prompt.environment]


@dataclass(frozen=True)
class _Floor:
    """Where episodes are played. end: to be called when one has ended."""

    environments: Environments
    ask: Ask
    places: asyncio.Semaphore
    end: Callable[[], None]
    sampling: SamplingConfig


def play_groups(
    cluster: Cluster,
    environments: Environments,
    prompts: Sequence[Prompt],
    responses: int,
    sampling: SamplingConfig,
    seed: int,
    submit: Callable[[Sequence[Trajectory]], Future[Scored]],
    source: str,
    first_group: int,
) -> list[Scored]:
    """Episodes of each prompt, each group scored when its last one has ended. A group of which an
    episode failed is not scored: what it lacks is among its failures. Groups are numbered by the
    prompts' places, from the first on."""
    seeds = derive_seeds(seed, len(prompts))
    together = cluster.responses_per_request()

    async def talk(ask: Ask) -> list[Scored]:
        places = environments.at_once
        rounds = Rounds(ask, together, seed, len(prompts) * responses, places)
        floor = _Floor(
            environments,
            rounds.ask if together > 1 else ask,
            asyncio.Semaphore(places),
            rounds.end,
            sampling,
        )

        async def group(place: int) -> Scored:
            prompt, own = prompts[place], seeds[place]
            first = place * responses
            found = await side_by_side(
                _episode(floor, prompt, own, number, first + number) for number in range(responses)
            )
            table = environments.player_of(prompt).table
            failed = [one for one in found if isinstance(one, Failed)]
            if failed:
                number = first_group + place
                told = [_failure(one, prompt, number, table, source) for one in failed]
                return Scored((), tuple(told))
            played = [
                replace(t, group=first_group + place) for t in found if isinstance(t, Trajectory)
            ]
            return await asyncio.wrap_future(submit(played))

        return await side_by_side(map(group, range(len(prompts))))

    return cluster.converse(environments.loop, talk)


async def _episode(
    floor: _Floor, prompt: Prompt, seed: int, number: int, place: int
) -> Trajectory | Failed:
    """One episode, tried again from its beginning where its environment fails. place: among all."""
    player = floor.environments.player_of(prompt)
    failed = Failed("")
    for attempt in range(1 + player.table.config.retries):
        policy = Policy(floor.ask, place, floor.sampling, seed + number + attempt * _ATTEMPT)
        async with floor.places:
            try:
                found = await player.play(prompt, seed, number, policy)
            except EnvironmentFailed as error:
                failed = error.failed
            else:
                floor.end()
                return found
    floor.end()
    return failed


def _failure(
    failed: Failed, prompt: Prompt, group: int, table: Table, source: str
) -> RewardFailure:
    where = f"The environment {table.name!r}, at row {prompt.index} (from 0) of {source}"
    shown = f"The prompt{cut(prompt.text)}."
    return RewardFailure(
        group,
        prompt.index,
        ENVIRONMENT,
        where,
        failed.said,
        shown,
        failed.lines,
        failed.kind,
        "environments",
    )
