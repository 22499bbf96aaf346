"""Play groups of episodes in parallel; thousands may be in flight, to fill the engines' batches.

For engines that take many prompts in one request, turns of several episodes are sampled together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count, groupby

from plimsoll.config.rl import ENVIRONMENT
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.episode import EpisodePolicy, EpisodeRules
from plimsoll.environment.protocol import EnvironmentFailed
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.outcome import Failed, side_by_side
from plimsoll.reward.score import OnFailure, RewardFailure, Scored, quote_beginning
from plimsoll.rl.group_journal import NO_JOURNAL, GroupJournal
from plimsoll.sampler.protocol import Ask, Request, derive_seeds


@dataclass(frozen=True)
class _WaitingTurn:
    stop: tuple[str, ...]
    episode: int
    request: Request
    answer: asyncio.Future[list[Trajectory]]


class Rounds:
    """Collects the turns that episodes ask for, and samples them together in rounds.

    A round begins when every episode in flight waits for a turn. So the same turns are sampled
    together in every run, however long environments take, but a slow environment keeps the other
    episodes waiting. Turns with different stop strings are sampled in different requests. Each turn
    asks for one response to one prompt.
    """

    def __init__(self, ask: Ask, at_once: int, seed: int, episodes: int, places: int) -> None:
        """Begin with no turn waiting.

        Args:
            ask: asks the engine.
            at_once: the most prompts in one request.
            seed: the seed from which the seeds of all requests are derived.
            episodes: the number of episodes that will be played.
            places: the most episodes in flight.
        """
        self._ask, self._at_once = ask, at_once
        self._seeds = [seed]
        self._left, self._places = episodes, places
        self._waiting: list[_WaitingTurn] = []
        self._asking: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Note that an episode has ended and is not tried again."""
        self._left -= 1
        self._begin_round()

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Return the response to a turn, once its round was sampled; the method is an `Ask`."""
        answer: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingTurn(request.sampling.stop, episode, request, answer))
        self._begin_round()
        try:
            return await answer
        except asyncio.CancelledError:
            self._waiting = [turn for turn in self._waiting if turn.answer is not answer]
            raise

    def _begin_round(self) -> None:
        if not self._waiting or len(self._waiting) < min(self._left, self._places):
            return
        waiting = sorted(self._waiting, key=lambda turn: (turn.stop, turn.episode))
        self._waiting = []
        size = self._at_once
        alike = [list(turns) for _, turns in groupby(waiting, key=lambda turn: turn.stop)]
        parts = [turns[i : i + size] for turns in alike for i in range(0, len(turns), size)]
        self._seeds = derive_seeds(self._seeds[-1], len(parts) + 1)
        for part, seed in zip(parts, self._seeds, strict=False):
            task = asyncio.get_running_loop().create_task(self._sample(part, seed))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _sample(self, turns: list[_WaitingTurn], seed: int) -> None:
        requests = [turn.request for turn in turns]
        whole = Request(
            tuple(prompt for request in requests for prompt in request.prompts),
            1,
            requests[0].sampling,
            seed,
            tuple(most for request in requests for most in request.most_tokens()),
        )
        samples = await self._ask(whole, turns[0].episode)
        for turn, sample in zip(turns, samples, strict=True):
            if not turn.answer.done():  # who asked may have given up
                turn.answer.set_result([sample])


Submit = Callable[[Sequence[Trajectory], OnFailure], Future[Scored]]
"""A function that begins to score; see `Scorer.submit`."""

EPISODES = count()
"""The numbers of episodes; those of a process are all different."""
_ATTEMPT = 7_919
"""The difference between the seeds of two tries of an episode."""


@dataclass(frozen=True)
class Player:
    """The player of one environment's episodes.

    Attributes:
        rules: the settings that all its episodes share.
        play: a function of (prompt, seed of the group, number in the group, policy) that plays an
            episode and returns its trajectory.
    """

    rules: EpisodeRules
    play: Callable[[Prompt, int, int, EpisodePolicy], Awaitable[Trajectory]]


@dataclass(frozen=True)
class Environments:
    """The environments of a run.

    Attributes:
        players: the player of each environment, by its name in the config.
        at_once: the most episodes in flight.
        kept: whether the journal keeps an episode when it ends, not only with its scored group. It
            has no objects there, which some rewards read.
        places: limits the episodes in flight, of training and of evaluations together.
    """

    players: Mapping[str, Player]
    at_once: int
    kept: bool
    places: asyncio.Semaphore

    def player_of(self, prompt: Prompt) -> Player:
        """Return the player of the environment that the prompt names, or the run's only player."""
        if len(self.players) == 1:
            return next(iter(self.players.values()))
        return self.players[prompt.environment]


@dataclass(frozen=True)
class Asking:
    """How engines are asked, and what becomes of their answers.

    Attributes:
        ask: asks an engine.
        responses: the number of responses to each prompt.
        sampling: how they are sampled.
        submit: begins to score responses.
        on_failure: called for each environment or reward that fails.
    """

    ask: Ask
    responses: int
    sampling: SamplingConfig
    submit: Submit
    on_failure: OnFailure


@dataclass(frozen=True)
class Floor:
    """What the episodes in flight share.

    Attributes:
        environments: the environments of the run.
        asking: asks engines, and scores each group; its responses are episodes.
        source: the config key of the prompts, for messages.
        end: a function to call when an episode has ended.
    """

    environments: Environments
    asking: Asking
    source: str
    end: Callable[[], None] = lambda: None


async def play_groups(
    floor: Floor,
    prompts: Sequence[Prompt],
    seed: int,
    first_group: int,
    together: int,
    journal: GroupJournal,
) -> list[Scored]:
    """Play the episodes of all prompts, and return each group with its rewards.

    A group is scored when its last episode has ended. If one of its episodes failed, the group is
    not scored, and its failures are returned instead. Groups are numbered in the order of the
    prompts, from `first_group`. Engines want `together` responses in one request: if that is more
    than one, turns are sampled in rounds. Groups of the journal are not played again, unless turns
    are sampled in rounds: what is sampled together there depends on all episodes.
    """
    if together > 1:
        journal, asking = NO_JOURNAL, floor.asking
        episodes, places = len(prompts) * asking.responses, floor.environments.at_once
        rounds = Rounds(asking.ask, together, seed, episodes, places)
        floor = replace(floor, asking=replace(asking, ask=rounds.ask), end=rounds.end)
    return await side_by_side(
        play_group(floor, prompt, prompt_seed, first_group + i, journal.under(i))
        for i, (prompt, prompt_seed) in enumerate(
            zip(prompts, derive_seeds(seed, len(prompts)), strict=True)
        )
    )


async def play_group(
    floor: Floor, prompt: Prompt, seed: int, group: int, journal: GroupJournal
) -> Scored:
    """Play the episodes of a prompt as a group with this number; return it with its rewards.

    Its failures are returned instead if one of the episodes failed. If the journal has the group,
    or some of its episodes, they are not played again.
    """
    asking = floor.asking
    if (found := journal.find([prompt] * asking.responses)) is not None:
        return found
    of_episodes = journal if floor.environments.kept else NO_JOURNAL
    rules = floor.environments.player_of(prompt).rules
    failures: list[RewardFailure] = []

    def note_failure(outcome: Failed, tries_left: int) -> None:
        failure = _failure(outcome, prompt, group, rules, floor.source, tries_left)
        if tries_left == 0:
            failures.append(failure)
        asking.on_failure(failure)

    episodes = await side_by_side(
        _episode(floor, prompt, seed, number, note_failure, of_episodes.under(number))
        for number in range(asking.responses)
    )
    played = [replace(t, group=group) for t in episodes if t is not None]
    if failures:
        return Scored((), tuple(failures))
    scored = await asyncio.wrap_future(asking.submit(played, asking.on_failure))
    journal.keep(scored)
    return scored


async def _episode(
    floor: Floor,
    prompt: Prompt,
    seed: int,
    number: int,
    note_failure: Callable[[Failed, int], None],
    journal: GroupJournal,
) -> Trajectory | None:
    """Play an episode and return its trajectory, or None if every try failed.

    If the environment fails, the episode is played again from its beginning. If the journal has it,
    it is not played.

    Args:
        floor: what the episodes in flight share.
        prompt: the prompt to begin with.
        seed: the seed of the group.
        number: the number of the episode in its group.
        note_failure: called after each failed try, with the number of tries that are left.
        journal: has the episode if it ended before a crash.
    """
    if (found := journal.find_episode(prompt)) is not None:
        floor.end()
        return found
    player = floor.environments.player_of(prompt)
    retries, episode, asking = player.rules.config.retries, next(EPISODES), floor.asking
    for attempt in range(1 + retries):
        own_seed = seed + number + attempt * _ATTEMPT
        policy = EpisodePolicy(asking.ask, episode, asking.sampling, own_seed)
        async with floor.environments.places:
            try:
                trajectory = await player.play(prompt, seed, number, policy)
            except EnvironmentFailed as error:
                note_failure(error.failed, retries - attempt)
            else:
                journal.keep_episode(trajectory)
                floor.end()
                return trajectory
    floor.end()
    return None


def _failure(
    failed: Failed, prompt: Prompt, group: int, rules: EpisodeRules, source: str, tries_left: int
) -> RewardFailure:
    where = f"The environment {rules.name!r}, at row {prompt.index} (from 0) of {source}"
    prompt_text = f"The prompt{quote_beginning(prompt.text)}."
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
