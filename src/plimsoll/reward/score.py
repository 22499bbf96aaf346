"""From the config's rewards to what scores trajectories, all rewards side by side as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import PlimsollError
from plimsoll.records import RewardPart, Trajectory
from plimsoll.reward.event_loop import end_all, event_loop
from plimsoll.reward.opening import open_source
from plimsoll.reward.outcome import Broken, Failed, Given, Outcome
from plimsoll.reward.rule import Rule, Rules, build_rewards, shown_texts
from plimsoll.reward.running import Running, State
from plimsoll.reward.source import Source, side_by_side


@dataclass(frozen=True)
class RewardFailure:
    """A reward that gave no number for a trajectory, however often it was tried; or an environment
    that did not get through an episode.

    group, prompt_index: the trajectory's. where: the reward or the environment, and the row, as
    messages name them. what: of which kind it is, in messages.
    said: what it said, going on after `where`. shown: prompt and response. lines: of a traceback.
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

    def __str__(self) -> str:
        return f"{self.where}{self.said}. {self.shown}\n{self.lines}".rstrip()

    def error(self) -> PlimsollError:
        """What stops a run for it."""
        return self.kind(str(self))


@dataclass(frozen=True)
class Scored:
    """trajectories: those that got all parts of their reward, in the order they were given in.
    failures: what the others lack, at least one each."""

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
    gave. source: of their prompts,
    as the config calls it."""

    parts: tuple[Part, ...]
    loop: asyncio.AbstractEventLoop
    source: str = "data.train"

    def of_held_out(self, key: str = "data.eval") -> Scorer:
        """The same for held-out prompts. key: of their set in the config."""
        return replace(self, source=key)

    def submit(self, trajectories: Sequence[Trajectory]) -> Future[Scored]:
        """Begin to score; returns at once. What is given by all calls is scored side by side.

        Values are those before `normalize`; see `normalized`.

        The future raises PlimsollError, naming rule, row, prompt and response, as soon as something
        else than a finite number comes, or what no other try would mend.
        """
        return asyncio.run_coroutine_threadsafe(self._scored(tuple(trajectories)), self.loop)

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

    def check_reference(self, reference: str) -> None:
        """As `Rules.check_reference`."""
        Rules(tuple(part.rule for part in self.parts)).check_reference(reference)

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Take the values of rewards that are normalised into their statistics. A step's come at
        once, so that in which order they were scored changes nothing."""
        for part in self.parts:
            if part.running is not None:
                part.running.add([_value(t, part.rule.name) for t in trajectories])

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

    async def _scored(self, trajectories: tuple[Trajectory, ...]) -> Scored:
        columns = await side_by_side(self._outcomes(part, trajectories) for part in self.parts)
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
        return replace(trajectory, rewards=(*trajectory.rewards, *rewards))

    async def _outcomes(self, part: Part, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        found = await part.source.score(trajectories)
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
    rules = build_rewards(rewards).rules
    with event_loop() as loop:
        stack = AsyncExitStack()
        opening = _opened(rules, stack)
        try:
            yield Scorer(asyncio.run_coroutine_threadsafe(opening, loop).result(), loop)
        finally:
            asyncio.run_coroutine_threadsafe(_close(stack), loop).result()


async def _opened(rules: Sequence[Rule], stack: AsyncExitStack) -> tuple[Part, ...]:
    return tuple(
        [Part(rule, await open_source(rule, stack), Running.of(rule.config)) for rule in rules]
    )


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


def _value(trajectory: Trajectory, name: str) -> float:
    return next(part.value for part in trajectory.rewards if part.name == name)


def _failure(
    rule: Rule, trajectory: Trajectory, outcome: Failed | Broken, source: str
) -> RewardFailure:
    index = trajectory.prompt.index
    where = f"The {rule.shown}, at row {index} (from 0) of {source}"
    lines = outcome.lines if isinstance(outcome, Failed) else ""
    shown = shown_texts(trajectory)
    return RewardFailure(
        trajectory.group, index, rule.name, where, outcome.said, shown, lines, outcome.kind
    )
