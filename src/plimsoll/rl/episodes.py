"""Groups of episodes, side by side: thousands may be in flight against the engines' batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import ENVIRONMENT
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.episode import EpisodePolicy, EpisodeRules
from plimsoll.environment.results import EnvironmentFailed
from plimsoll.environment.rounds import Rounds
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.outcome import Failed
from plimsoll.reward.rule import cut
from plimsoll.reward.score import OnFailure, RewardFailure, Scored
from plimsoll.reward.source import side_by_side
from plimsoll.rollout.protocol import Ask, derive_seeds

Submit = Callable[[Sequence[Trajectory], OnFailure], Future[Scored]]
"""A function that begins to score; see `Scorer.submit`."""

_ATTEMPT = 7_919
"""The difference between the seeds of two tries of an episode."""


@dataclass(frozen=True)
class Player:
    """What plays the episodes of one environment.

    Attributes:
        rules: what all its episodes have in common.
        play: plays an episode, given (prompt, seed of the group, number in the group, policy).
    """

    rules: EpisodeRules
    play: Callable[[Prompt, int, int, EpisodePolicy], Awaitable[Trajectory]]


@dataclass(frozen=True)
class Environments:
    """The environments of a run.

    Attributes:
        players: by the environments' names in the config.
        at_once: the most episodes in flight.
        loop: the event loop in which they are played.
    """

    players: Mapping[str, Player]
    at_once: int
    loop: asyncio.AbstractEventLoop

    def player_of(self, prompt: Prompt) -> Player:
        """Return the player that a prompt's row names; the only one if there is one."""
        if len(self.players) == 1:
            return next(iter(self.players.values()))
        return self.players[prompt.environment]


@dataclass(frozen=True)
class _Floor:
    """What the episodes in flight share.

    Attributes:
        environments: the environments of the run.
        ask: asks an engine.
        places: one for each episode that may be in flight.
        end: to be called when an episode has ended.
        sampling: how turns are sampled.
    """

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
    submit: Submit,
    on_failure: OnFailure,
    source: str,
    first_group: int,
) -> list[Scored]:
    """Play episodes of each prompt; score each group when its last episode has ended.

    A group of which an episode failed is not scored: its failures are returned instead. Groups are
    numbered by the prompts' places, from `first_group` on. `on_failure` is called with environments
    and rewards that fail; what it raises ends all episodes.
    """
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
            prompt, group_seed = prompts[place], seeds[place]
            first, number_of_group = place * responses, first_group + place
            rules = environments.player_of(prompt).rules
            failures: list[RewardFailure] = []

            def note_failure(outcome: Failed, tries_left: int) -> None:
                failure = _failure(outcome, prompt, number_of_group, rules, source, tries_left)
                if tries_left == 0:
                    failures.append(failure)
                on_failure(failure)

            episodes = await side_by_side(
                _episode(floor, prompt, group_seed, number, first + number, note_failure)
                for number in range(responses)
            )
            played = [replace(t, group=number_of_group) for t in episodes if t is not None]
            if failures:
                return Scored((), tuple(failures))
            return await asyncio.wrap_future(submit(played, on_failure))

        return await side_by_side(map(group, range(len(prompts))))

    return cluster.converse(environments.loop, talk)


async def _episode(
    floor: _Floor,
    prompt: Prompt,
    seed: int,
    number: int,
    place: int,
    note_failure: Callable[[Failed, int], None],
) -> Trajectory | None:
    """Play an episode, and again from its beginning if its environment fails.

    Return None if the last try fails. `number` is its number in the group, which has the seed, and
    `place` its place among all episodes. `note_failure` is called after each try that failed, with
    the number of tries that are left.
    """
    player = floor.environments.player_of(prompt)
    retries = player.rules.config.retries
    for attempt in range(1 + retries):
        policy = EpisodePolicy(floor.ask, place, floor.sampling, seed + number + attempt * _ATTEMPT)
        async with floor.places:
            try:
                trajectory = await player.play(prompt, seed, number, policy)
            except EnvironmentFailed as error:
                note_failure(error.failed, retries - attempt)
            else:
                floor.end()
                return trajectory
    floor.end()
    return None


def _failure(
    failed: Failed, prompt: Prompt, group: int, rules: EpisodeRules, source: str, tries_left: int
) -> RewardFailure:
    where = f"The environment {rules.name!r}, at row {prompt.index} (from 0) of {source}"
    prompt_text = f"The prompt{cut(prompt.text)}."
    return RewardFailure(
        group,
        prompt.index,
        ENVIRONMENT,
        where,
        failed.said,
        prompt_text,
        failed.lines,
        failed.kind,
        "environments",
        failed.unanswered,
        tries_left,
    )
