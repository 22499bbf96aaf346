"""From the config's rewards to what scores trajectories, all rewards side by side as they come: by
threads, processes or clients that are held until the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import ENVIRONMENT
from plimsoll.errors import PlimsollError
from plimsoll.machine.host import usable_cores
from plimsoll.records import RewardPart, Trajectory
from plimsoll.reward.functions.calls import FunctionHere, is_coroutine, takes_many
from plimsoll.reward.functions.processes import open_in_processes
from plimsoll.reward.outcome import Broken, Failed, Given, Outcome, TimeLimit
from plimsoll.reward.price import MOST_PROCESSES
from plimsoll.reward.references import processes_asked
from plimsoll.reward.rule import Rule, build_rule, shown_texts
from plimsoll.reward.running import Running, State
from plimsoll.reward.servers.http import Servers
from plimsoll.reward.servers.judge import Judge
from plimsoll.reward.source import Call, Source, Watch, end_all, event_loop, side_by_side

_FUNCTION_WAIT = 0.1
_SERVER_WAIT = 0.5
_COROUTINES = 64


async def open_source(rule: Rule, stack: AsyncExitStack) -> Source:
    """What scores a rule. To be asked in the event loop that it will work in; what it holds is let
    go by the stack."""
    config, key = rule.config, f"rewards.{rule.name}"
    if (http := config.http) is not None:
        client = await stack.enter_async_context(_client())
        limit = TimeLimit(http.time_limit, f"{key}.http.time_limit")
        places = asyncio.Semaphore(http.at_once * len(http.urls))
        servers = Servers.of(http, client, limit)
        return Source(servers, http.batch, http.retries, _SERVER_WAIT, places)
    if (judge := config.judge) is not None:
        client = await stack.enter_async_context(_client())
        limit = TimeLimit(judge.time_limit, f"{key}.judge.time_limit")
        places = asyncio.Semaphore(judge.at_once)
        return Source(Judge.of(judge, client, limit), 1, judge.retries, _SERVER_WAIT, places)
    assert rule.function is not None
    batch = takes_many(rule.function) if config.batch is None else config.batch
    at_once = config.at_once or _calls_at_once(config, rule.function)
    limit = TimeLimit(config.time_limit, f"{key}.time_limit")
    call = _function_call(config, rule.function, batch, at_once, limit, stack)
    size = None if batch else 1
    return Source(call, size, config.retries, _FUNCTION_WAIT, asyncio.Semaphore(at_once))


def _calls_at_once(config: RewardConfig, function: partial[Any]) -> int:
    """Return how many calls are made at the same time where `at_once` does not say."""
    if config.process or processes_asked(function):
        return min(usable_cores(), MOST_PROCESSES)
    return _COROUTINES if is_coroutine(function) else 1


def _function_call(
    config: RewardConfig,
    function: partial[Any],
    batch: bool,
    at_once: int,
    limit: TimeLimit,
    stack: AsyncExitStack,
) -> Call:
    if not config.process:
        return FunctionHere(function, batch, is_coroutine(function), limit)
    return open_in_processes(config, batch, limit, at_once, stack)


def _client() -> httpx.AsyncClient:
    """Without bounds of its own: `at_once` and `time_limit` are the config's."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


@dataclass(frozen=True)
class RewardFailure:
    """A reward that gave no number for a trajectory, or an environment that did not get through an
    episode.

    Attributes:
        group: the trajectory's group.
        prompt_index: the row of its prompt.
        reward: the name of the reward, or `environment`.
        where: the reward or the environment, and the row, as messages name them.
        said: what it said, going on after `where`.
        shown: prompt and response.
        lines: lines of a traceback.
        kind: the error that stops a run for it.
        what: what failed, in the plural, for messages.
        unanswered: whether no answer came at all; see `Failed`.
        tries_left: how often it is tried again; 0: the group is lost.
    """

    group: int
    prompt_index: int
    reward: str
    where: str
    said: str
    shown: str
    lines: str = ""
    kind: type[PlimsollError] = PlimsollError
    what: str = "rewards"
    unanswered: bool = False
    tries_left: int = 0

    def __str__(self) -> str:
        return f"{self.where}{self.said}. {self.shown}\n{self.lines}".rstrip()

    def error(self) -> PlimsollError:
        """What stops a run for it."""
        return self.kind(str(self))


OnFailure = Callable[[RewardFailure], None]
"""Hears of each try that failed, in the event loop of the rewards; raises to end the scoring."""


def _go_on(failure: RewardFailure) -> None:
    """Let nothing end the scoring."""


@dataclass(frozen=True)
class Scored:
    """What came of trajectories.

    Attributes:
        trajectories: those that got all parts of their reward, in the order they were given in.
        failures: what others lack, at least one for each group that lost a trajectory. The rest of
            such a group may be in neither: it is not scored any more.
    """

    trajectories: tuple[Trajectory, ...]
    failures: tuple[RewardFailure, ...]


@dataclass(frozen=True)
class Part:
    """A rule, and what scores it. running: of its values so far, where they are normalised."""

    rule: Rule
    source: Source
    running: Running | None


@dataclass(frozen=True)
class Scorer:
    """Gives trajectories their reward parts, in the order of the config, after what an environment
    gave. held: what is let go of with the loop. source: of their prompts,
    as the config calls it."""

    parts: tuple[Part, ...]
    loop: asyncio.AbstractEventLoop
    held: AsyncExitStack
    source: str = "data.train"

    def of_held_out(self, key: str = "data.eval") -> Scorer:
        """The same for held-out prompts. key: of their set in the config."""
        return replace(self, source=key)

    def submit(
        self, trajectories: Sequence[Trajectory], on_failure: OnFailure = _go_on
    ) -> Future[Scored]:
        """Begin to score; returns at once. What is given by all calls is scored side by side.

        Values are those before `normalize`; see `normalized`.

        The future raises PlimsollError, naming rule, row, prompt and response, as soon as something
        else than a finite number comes, or what no other try would mend; and what `on_failure`
        raises.
        """
        scoring = self._scored(tuple(trajectories), on_failure)
        return asyncio.run_coroutine_threadsafe(scoring, self.loop)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """New trajectories with the parts.

        Raises PlimsollError, as `submit`, and for the first trajectory that a reward failed for.
        """
        future = self.submit(trajectories)
        try:
            scored = future.result()
        except BaseException:  # Ctrl-C, too
            future.cancel()
            raise
        if scored.failures:
            raise scored.failures[0].error()
        return [*scored.trajectories]

    def check_reference(self, reference: object) -> None:
        """Have every rule look at a reference; raises as `Rule.check_reference`."""
        for part in self.parts:
            part.rule.check_reference(reference)

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Take the values of rewards that are normalised into their statistics. A step's come at
        once, so that in which order they were scored changes nothing."""
        for part in self.parts:
            if part.running is not None:
                own = (part_ for t in trajectories for part_ in t.rewards)
                part.running.add([one.value for one in own if one.name == part.rule.name])

    def normalized(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """New trajectories with these values less the mean of those that were observed, over their
        standard deviation; other parts as they are."""
        running = {p.rule.name: p.running for p in self.parts if p.running is not None}

        def changed(part: RewardPart) -> RewardPart:
            own = running.get(part.name)
            return part if own is None else replace(part, value=own.normalized(part.value))

        return [replace(t, rewards=tuple(map(changed, t.rewards))) for t in trajectories]

    def state(self) -> dict[str, State]:
        """The running statistics of the rewards that are normalised, by name, as plain numbers."""
        return {p.rule.name: p.running.state() for p in self.parts if p.running is not None}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on with the statistics of a run that went before; those without any begin anew."""
        for part in self.parts:
            if part.running is not None and part.rule.name in state:
                part.running.restore(state[part.rule.name])

    async def _scored(self, trajectories: tuple[Trajectory, ...], on_failure: OnFailure) -> Scored:
        lost: set[int] = set()
        columns = await side_by_side(
            self._outcomes(part, trajectories, lost, on_failure) for part in self.parts
        )
        rows = [[column[i] for column in columns] for i in range(len(trajectories))]
        failures = [
            _failure(part.rule, trajectory, outcome, self.source)
            for trajectory, row in zip(trajectories, rows, strict=True)
            for part, outcome in zip(self.parts, row, strict=True)
            if isinstance(outcome, Failed)
        ]
        whole = [i for i, row in enumerate(rows) if all(isinstance(one, Given) for one in row)]
        scored = [trajectories[i] for i in whole]
        values = [
            _values(part.rule, scored, [column[i] for i in whole])
            for part, column in zip(self.parts, columns, strict=True)
        ]
        return Scored(
            tuple(self._with_parts(t, [own[at] for own in values]) for at, t in enumerate(scored)),
            tuple(failures),
        )

    def _with_parts(self, trajectory: Trajectory, values: Sequence[float]) -> Trajectory:
        parts = zip(self.parts, values, strict=True)
        rewards = (RewardPart(p.rule.name, value, p.rule.config.weight) for p, value in parts)
        played = [part for part in trajectory.rewards if part.name == ENVIRONMENT]
        return replace(trajectory, rewards=(*played, *rewards), transcript=None)

    async def _outcomes(
        self,
        part: Part,
        trajectories: Sequence[Trajectory],
        lost: set[int],
        on_failure: OnFailure,
    ) -> list[Outcome]:
        def failed(trajectory: Trajectory, outcome: Failed, tries_left: int) -> None:
            if tries_left == 0:
                lost.add(trajectory.group)
            on_failure(_failure(part.rule, trajectory, outcome, self.source, tries_left))

        found = await part.source.score(trajectories, Watch(failed, lost))
        for trajectory, outcome in zip(trajectories, found, strict=True):
            if isinstance(outcome, Broken):
                raise _failure(part.rule, trajectory, outcome, self.source).error()
        return found


@contextmanager
def open_rewards(rewards: Mapping[str, RewardConfig]) -> Iterator[Scorer]:
    """The scorer of a config's `rewards`, and the event loop, processes and HTTP clients that it
    needs; all of them are closed at the end, whatever it is.

    Raises ConfigError where a rule or an option cannot be used.
    """
    rules = [build_rule(name, config) for name, config in rewards.items()]
    with event_loop() as loop:
        stack = AsyncExitStack()
        opening = _opened(rules, stack)
        try:
            yield Scorer(asyncio.run_coroutine_threadsafe(opening, loop).result(), loop, stack)
        finally:
            asyncio.run_coroutine_threadsafe(_close(stack), loop).result()


async def _opened(rules: Sequence[Rule], stack: AsyncExitStack) -> tuple[Part, ...]:
    running = [Running() if rule.config.normalize else None for rule in rules]
    sources = [await open_source(rule, stack) for rule in rules]
    return tuple(map(Part, rules, sources, running))


async def _close(stack: AsyncExitStack) -> None:
    await end_all()  # what is still at work would replace what is ended
    await stack.aclose()


def _values(
    rule: Rule, trajectories: Sequence[Trajectory], given: Sequence[Outcome]
) -> list[float]:
    """The values of a part, within its bounds."""
    return [
        rule.adjusted(one.value, trajectory)
        for trajectory, one in zip(trajectories, given, strict=True)
        if isinstance(one, Given)
    ]


def _failure(
    rule: Rule,
    trajectory: Trajectory,
    outcome: Failed | Broken,
    source: str,
    tries_left: int = 0,
) -> RewardFailure:
    index = trajectory.prompt.index
    return RewardFailure(
        trajectory.group,
        index,
        rule.name,
        f"The {rule.shown}, at row {index} (from 0) of {source}",
        outcome.said,
        shown_texts(trajectory),
        outcome.lines if isinstance(outcome, Failed) else "",
        outcome.kind,
        unanswered=isinstance(outcome, Failed) and outcome.unanswered,
        tries_left=tries_left,
    )
