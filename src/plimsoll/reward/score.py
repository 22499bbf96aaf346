"""The rules of the config's rewards, and the scorer, which calls all of them concurrently.

A `Rule` is a reward of the config with its function and its check of references. The scorer calls
the rules for each trajectory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import httpx

from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import ENVIRONMENT
from plimsoll.data.fields import ReferenceCheck, reference_text
from plimsoll.errors import ConfigError, DataError, PlimsollError, failure
from plimsoll.machine.host import usable_cores
from plimsoll.process.child import processes_at_once
from plimsoll.records import RewardPart, Trajectory
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.functions import call_here, call_in_processes, is_coroutine, takes_many
from plimsoll.reward.outcome import (
    SHOWN_CHARACTERS,
    Failed,
    Outcome,
    RewardCall,
    RewardHosts,
    RewardSource,
    TimeLimit,
    end_all,
    event_loop,
    side_by_side,
)
from plimsoll.reward.references import (
    Check,
    describe_check,
    helper_process,
    reference_check,
)
from plimsoll.reward.servers import Judge, call_servers


@dataclass(frozen=True)
class Rule:
    """One entry of the config's `rewards`."""

    name: str
    """The part's name in the config."""
    config: RewardConfig
    function: partial[Any] | None
    """The function that `config.name` names, its options bound; None for servers or a judge."""
    check: Check | None
    """The check of references that the function brings, if any."""

    @property
    def label(self) -> str:
        """The rule's name in messages, such as `reward 'mine' (my_rewards:short)`."""
        place = f" ({self.config.name})" if ":" in self.config.name else ""
        return f"reward {self.name!r}{place}"

    def adjust(self, value: float, trajectory: Trajectory) -> float:
        """Return a value clipped to `clip`, then times `truncated_factor` for a cut response.

        A value that is not finite stays as it is.
        """
        if self.config.clip is not None and math.isfinite(value):
            low, high = self.config.clip
            value = min(max(value, low), high)
        factor = self.config.truncated_factor
        truncated = trajectory.finish_reason == "length"
        return value if factor is None or not truncated else value * factor

    def check_reference(self, reference: object) -> None:
        """Check a reference, given as its row has it; do nothing if it is good.

        Raises DataError, naming the rule, if the check refuses the reference, and PlimsollError if
        the check itself fails.
        """
        try:
            if self.check is not None:
                self.check(reference)
        except ValueError as error:
            raise DataError(f"is no reference for the reward {self.name!r}: {error}") from error
        except PlimsollError:
            raise
        except Exception as error:
            where = f"The check of references of the {self.label}"
            text = f"The reference{quote_beginning(reference_text(reference))}."
            raise failure(where, error, text) from error


def build_rule(name: str, config: RewardConfig) -> Rule:
    """Return the rule of one entry of a config's `rewards`.

    Raises ConfigError if its function or an option cannot be used.
    """
    try:
        function = reward_function(config) if config.name else None
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error
    return Rule(name, config, function, None if function is None else reference_check(function))


def texts_of(trajectory: Trajectory) -> str:
    """Return two sentences for messages, with the beginnings of prompt and response."""
    texts = {"prompt": trajectory.prompt.text, "response": trajectory.response_text}
    return " ".join(f"The {name}{quote_beginning(text)}." for name, text in texts.items())


def quote_beginning(text: str) -> str:
    """Return the rest of a sentence that quotes a text: `: '...'`, or ` (cut): '...'` if long."""
    mark = " (cut)" if len(text) > SHOWN_CHARACTERS else ""
    return f"{mark}: {text[:SHOWN_CHARACTERS]!r}"


MomentsState = dict[str, float]
"""`count`, `mean`, and `squares`: the sum of the squared differences from the mean."""

_LEAST_DEVIATION = 1e-8


class RunningMoments:
    """Mean and standard deviation of the values that were added so far.

    Chan, Golub and LeVeque 1979: two sets have counts n and m, means a and b, and sums S and T of
    squared differences from their means. Their union has the mean a + (b - a) * m / (n + m) and the
    sum S + T + (b - a)^2 * n * m / (n + m). For m = 1 this is Welford's algorithm.
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        """Add further values."""
        if not values:
            return
        count, mean = len(values), fmean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, difference = self._count + count, mean - self._mean
        self._squares += squares + difference**2 * self._count * count / total
        self._mean += difference * count / total
        self._count = total

    def normalize(self, value: float) -> float:
        """Return (value - mean) / standard deviation; (value - mean) if the deviation is 0.

        The deviation has n - 1 in its denominator.
        """
        deviation = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        return (value - self._mean) / (deviation if deviation > _LEAST_DEVIATION else 1.0)

    def state(self) -> MomentsState:
        """Return the moments as numbers by name, for `restore` in a resumed run."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Replace the moments by those in a state that `state` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares = state["squares"]


_FUNCTION_WAIT = 0.1
_SERVER_WAIT = 0.5
_COROUTINES = 64


async def open_source(rule: Rule, stack: AsyncExitStack) -> RewardSource:
    """Return the source of a rule's values; call this in the event loop that will use the source.

    Closing `stack` closes the source's HTTP client or processes.
    """
    config, key = rule.config, f"rewards.{rule.name}"
    if (http := config.http) is not None:
        client = await stack.enter_async_context(_client())
        limit = TimeLimit(http.time_limit, f"{key}.http.time_limit")
        places = asyncio.Semaphore(http.at_once * len(http.urls))
        servers = call_servers(http, client, limit)
        return RewardSource(servers, http.batch, http.retries, _SERVER_WAIT, places)
    if (judge := config.judge) is not None:
        client = await stack.enter_async_context(_client())
        limit = TimeLimit(judge.time_limit, f"{key}.judge.time_limit")
        places = asyncio.Semaphore(judge.at_once)
        return RewardSource(Judge(judge, client, limit), 1, judge.retries, _SERVER_WAIT, places)
    call, size = open_call(rule, stack), None if _takes_many(rule) else 1
    places = asyncio.Semaphore(_at_once(rule))
    return RewardSource(call, size, config.retries, _FUNCTION_WAIT, places)


def open_call(rule: Rule, stack: AsyncExitStack) -> RewardCall:
    """Return the try of a rule with a function; closing `stack` ends its processes."""
    assert rule.function is not None
    limit = TimeLimit(rule.config.time_limit, f"rewards.{rule.name}.time_limit")
    if rule.config.process:
        return call_in_processes(rule.config, _takes_many(rule), limit, _at_once(rule), stack)
    return call_here(rule.function, _takes_many(rule), limit)


def _takes_many(rule: Rule) -> bool:
    assert rule.function is not None
    return takes_many(rule.function) if rule.config.batch is None else rule.config.batch


def _at_once(rule: Rule) -> int:
    """Return how many calls of a rule's function this machine works on at once."""
    if _in_processes(rule):
        return rule.config.at_once or processes_at_once(usable_cores())
    assert rule.function is not None
    return rule.config.at_once or (_COROUTINES if is_coroutine(rule.function) else 1)


def _in_processes(rule: Rule) -> bool:
    """Return whether a rule's function works in processes of its own."""
    function = rule.function
    return function is not None and bool(rule.config.process or helper_process(function))


def _spread(rule: Rule, source: RewardSource, hosts: RewardHosts) -> RewardSource:
    """Return the source that computes a rule on all hosts, if it works in processes."""
    if not _in_processes(rule):
        return source

    async def call(trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        sent = [replace(t, transcript=None) for t in trajectories]
        return await hosts.score(rule.name, rule.config, sent)

    return replace(source, call=call, places=asyncio.Semaphore(_at_once(rule) * hosts.count))


def _client() -> httpx.AsyncClient:
    # Without bounds of its own: `at_once` and `time_limit` are the config's.
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


@dataclass(frozen=True)
class RewardFailure:
    """A reward that gave no number for a trajectory, or an environment that failed in an episode.

    Attributes:
        group: The trajectory's group.
        prompt_index: The row of its prompt.
        reward: The name of the reward, or `environment`.
        where: The beginning of the message: the reward or the environment, and the row.
        said: The rest of that sentence: what is wrong.
        shown: The beginnings of prompt and response, for the message.
        lines: Lines of a traceback.
        kind: The error that stops a run.
        what: What failed, in the plural, for messages.
        unanswered: Whether no answer came at all; see `Failed`.
        tries_left: How often it is tried again; if 0, the group is lost.
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
        """Return the error that stops a run for this failure."""
        return self.kind(str(self))


OnFailure = Callable[[RewardFailure], None]
"""Called for each failed try, in the event loop of the rewards; raises to end the scoring."""


def _go_on(failure: RewardFailure) -> None:
    """Do nothing, so that no failure ends the scoring."""


@dataclass(frozen=True)
class Scored:
    """The scored trajectories, and the failures of the others.

    Attributes:
        trajectories: The trajectories that got all parts of their reward, in the given order.
        failures: At least one failure for each group that lost a trajectory. Other trajectories of
            such a group may be neither scored nor failed, as scoring of the group stops.
    """

    trajectories: tuple[Trajectory, ...]
    failures: tuple[RewardFailure, ...]


@dataclass(frozen=True)
class Scorer:
    """Gives trajectories their reward parts: the environment's, then one per rule, in order."""

    rules: tuple[Rule, ...]
    sources: tuple[RewardSource, ...]
    """The source of each rule's values."""
    moments: Mapping[str, RunningMoments]
    """Mean and deviation of the values so far of each normalised reward, by its name."""
    loop: asyncio.AbstractEventLoop
    """The event loop in which all rewards are awaited."""
    held: AsyncExitStack
    """The stack of everything that is closed together with the loop."""
    source: str = "data.train"
    """The key of the prompts in the config, for messages."""
    keeps_bad_numbers: bool = False
    """Whether a value may be NaN or infinite: the caller leaves out the step that has it."""

    def on_hosts(self, hosts: RewardHosts | None) -> Scorer:
        """Return a scorer whose rewards that work in processes do so on all hosts, if there are."""
        if hosts is None:
            return self
        pairs = zip(self.rules, self.sources, strict=True)
        return replace(self, sources=tuple(_spread(*pair, hosts) for pair in pairs))

    def of_held_out(self, key: str = "data.eval") -> Scorer:
        """Return a scorer for held-out prompts, which `key` names in the config."""
        return replace(self, source=key, keeps_bad_numbers=False)

    def submit(
        self, trajectories: Sequence[Trajectory], on_failure: OnFailure = _go_on
    ) -> Future[Scored]:
        """Start scoring trajectories, and return at once a future of the scored trajectories.

        Several submissions are scored concurrently. The values are not normalised yet; see
        `normalize`.

        The future raises PlimsollError, naming rule, row, prompt and response, for the first value
        that no other try could mend, such as text. It also raises the errors of `on_failure`.
        """
        scoring = self._score(tuple(trajectories), on_failure)
        return asyncio.run_coroutine_threadsafe(scoring, self.loop)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with their reward parts, after waiting for all rewards.

        Raises PlimsollError as the future of `submit` does, and if a reward failed for any
        trajectory.
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
        """Check a reference with every rule; raise the errors of `Rule.check_reference`."""
        for rule in self.rules:
            rule.check_reference(reference)

    @property
    def references(self) -> ReferenceCheck | None:
        """The check of references by all rules; None if no rule has one."""
        checks = [[rule.name, *describe_check(rule.check)] for rule in self.rules if rule.check]
        return ReferenceCheck(self.check_reference, checks) if checks else None

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the finite values of an optimizer step to the moments of each normalised reward."""
        parts = [part for t in trajectories for part in t.rewards if math.isfinite(part.value)]
        for name, moments in self.moments.items():
            moments.add([part.value for part in parts if part.name == name])

    def normalize(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return copies of the trajectories, with the values of normalised rewards normalised.

        A value becomes (value - mean) / deviation, both of all values that were observed.
        """

        def normalize_part(part: RewardPart) -> RewardPart:
            observed = self.moments.get(part.name)
            return part if observed is None else replace(part, value=observed.normalize(part.value))

        return [replace(t, rewards=tuple(map(normalize_part, t.rewards))) for t in trajectories]

    def state(self) -> dict[str, MomentsState]:
        """Return the moments of each normalised reward by its name, for `restore`."""
        return {name: moments.state() for name, moments in self.moments.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Set the moments to the state of an earlier run; rewards not in the state start fresh."""
        for name, moments in self.moments.items():
            if name in state:
                moments.restore(state[name])

    async def _score(self, trajectories: tuple[Trajectory, ...], on_failure: OnFailure) -> Scored:
        lost: set[int] = set()
        columns = await side_by_side(
            self._outcomes(rule, source, trajectories, lost, on_failure)
            for rule, source in zip(self.rules, self.sources, strict=True)
        )
        whole: list[Trajectory] = []
        failures: list[RewardFailure] = []
        for trajectory, *outcomes in zip(trajectories, *columns, strict=True):
            pairs = list(zip(self.rules, outcomes, strict=True))
            parts = [
                RewardPart(rule.name, rule.adjust(outcome, trajectory), rule.config.weight)
                for rule, outcome in pairs
                if isinstance(outcome, float)
            ]
            failures += [
                _failure(rule, trajectory, outcome, self.source)
                for rule, outcome in pairs
                if isinstance(outcome, Failed)
            ]
            if len(parts) == len(self.rules):
                played = [part for part in trajectory.rewards if part.name == ENVIRONMENT]
                whole.append(replace(trajectory, rewards=(*played, *parts), transcript=None))
        return Scored(tuple(whole), tuple(failures))

    async def _outcomes(
        self,
        rule: Rule,
        source: RewardSource,
        trajectories: Sequence[Trajectory],
        lost: set[int],
        on_failure: OnFailure,
    ) -> list[Outcome]:
        def handle_failure(trajectory: Trajectory, outcome: Failed, tries_left: int) -> None:
            if tries_left == 0:
                lost.add(trajectory.group)
            on_failure(_failure(rule, trajectory, outcome, self.source, tries_left))

        def accept(trajectory: Trajectory, outcome: Outcome) -> Outcome:
            if not (isinstance(outcome, Failed) and outcome.final):
                return outcome
            if outcome.number is not None and self.keeps_bad_numbers:
                return outcome.number
            raise _failure(rule, trajectory, outcome, self.source).error()

        outcomes = await source.score(trajectories, handle_failure, lost)
        return list(map(accept, trajectories, outcomes))


@contextmanager
def open_rewards(
    rewards: Mapping[str, RewardConfig], keeps_bad_numbers: bool = False
) -> Iterator[Scorer]:
    """Yield the scorer of a config's `rewards`; see `Scorer` for `keeps_bad_numbers`.

    The end of the block closes its event loop, processes and HTTP clients, even after an error.
    Raises ConfigError if a rule or an option cannot be used.
    """
    rules = tuple(build_rule(name, config) for name, config in rewards.items())
    moments = {rule.name: RunningMoments() for rule in rules if rule.config.normalize}
    with event_loop() as loop:
        stack = AsyncExitStack()
        opening = _open(rules, stack)
        try:
            sources = asyncio.run_coroutine_threadsafe(opening, loop).result()
            yield Scorer(rules, sources, moments, loop, stack, keeps_bad_numbers=keeps_bad_numbers)
        finally:
            asyncio.run_coroutine_threadsafe(_close(stack), loop).result()


async def _open(rules: Sequence[Rule], stack: AsyncExitStack) -> tuple[RewardSource, ...]:
    return tuple([await open_source(rule, stack) for rule in rules])


async def _close(stack: AsyncExitStack) -> None:
    await end_all()  # work that goes on would start closed processes again
    await stack.aclose()


def _failure(
    rule: Rule,
    trajectory: Trajectory,
    outcome: Failed,
    source: str,
    tries_left: int = 0,
) -> RewardFailure:
    index = trajectory.prompt.index
    return RewardFailure(
        trajectory.group,
        index,
        rule.name,
        f"The {rule.label}, at row {index} (from 0) of {source}",
        outcome.said,
        texts_of(trajectory),
        outcome.lines,
        outcome.kind,
        unanswered=outcome.unanswered,
        tries_left=tries_left,
    )
