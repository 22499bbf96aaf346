"""Sample responses to prompts, or play episodes with an environment, and score them."""

from __future__ import annotations

from asyncio import AbstractEventLoop, wrap_future
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from plimsoll.cluster.protocol import Cluster, converse
from plimsoll.config.rollout import SamplingConfig
from plimsoll.config.run import RlBatch
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.outcome import side_by_side
from plimsoll.reward.score import OnFailure, RewardFailure, Scored
from plimsoll.rl.episodes import EPISODES, Asking, Environments, Floor, Submit, play_groups
from plimsoll.rl.group_journal import NO_JOURNAL, GroupJournal
from plimsoll.run.numbers import plural
from plimsoll.sampler.protocol import Request, derive_seeds

_KEY = "batch.max_failed_groups"

Note = Callable[[str], None]
"""A function that shows a line while the run goes on."""


class FailedGroups:
    """An `OnFailure` that counts lost groups, and ends the run if there are too many.

    A group is lost if a reward or an environment fails for it and no tries are left. For each
    reward, the first try without an answer is shown.
    """

    def __init__(self, note: Note, batch: RlBatch | None = None) -> None:
        """Begin without failures; `batch` says how many groups may fail (None: no group)."""
        self._note = note
        self._batch = batch
        self._allowed = 0 if batch is None else max(1, int(batch.max_failed_groups * batch.prompts))
        self._noted: set[str] = set()
        self._first: dict[int, RewardFailure] = {}

    def __len__(self) -> int:
        """Return the number of groups that are lost."""
        return len(self._first)

    def __call__(self, failure: RewardFailure) -> None:
        """Take note of a failed try; raise PlimsollError if more groups are lost than allowed.

        The error is raised once. Later failures are not counted, because the run is ending.
        """
        if failure.unanswered and failure.reward not in self._noted:
            self._noted.add(failure.reward)
            self._note(f"{failure.where}{failure.said}. {self._what_follows(failure.tries_left)}")
        if failure.tries_left or self._is_over():
            return
        self._first.setdefault(failure.group, failure)
        if self._is_over():
            raise self._error()

    def _is_over(self) -> bool:
        return len(self._first) > self._allowed

    def _what_follows(self, tries_left: int) -> str:
        if tries_left:
            again = f"It is tried {plural(tries_left, 'more time')}"
        else:
            again = "It is not tried again (retries)"
        if self._batch is None:
            return f"{again}. A held-out prompt without its reward ends the run."
        groups = plural(self._allowed, "group")
        return f"{again}. The run ends if more than {groups} of a step fail ({_KEY})."

    def _error(self) -> Exception:
        first = next(iter(self._first.values()))
        if self._batch is None:
            return first.error()
        return first.kind(
            f"{first.what} failed for {plural(len(self._first), 'group')} of a step of "
            f"{self._batch.prompts}, and {_KEY} is {self._batch.max_failed_groups:g}. The first: "
            f"{first}"
        )


@dataclass(frozen=True)
class Answering:
    """How prompts are answered and responses are scored.

    Attributes:
        loop: the event loop in which prompts are answered.
        submit: begins to score responses.
        note: shows a line while the run goes on.
        environments: the environments that play episodes; None: each response stands alone.
        source: the config key of the prompts, for messages.
        journal: keeps the scored responses of each request, and has those of before a crash.
    """

    loop: AbstractEventLoop
    submit: Submit
    note: Note
    environments: Environments | None = None
    source: str = "data.train"
    journal: GroupJournal = NO_JOURNAL


@dataclass(frozen=True)
class Answers:
    """Scored responses, in the order of their prompts, and the failures of the others."""

    trajectories: list[Trajectory]
    failures: list[RewardFailure]

    def whole_groups(self) -> list[list[Trajectory]]:
        """Return the trajectories of each group without a failure, group by group."""
        failed = {failure.group for failure in self.failures}
        kept = [t for t in self.trajectories if t.group not in failed]
        return [list(group) for _, group in groupby(kept, key=lambda t: t.group)]


def answers(
    cluster: Cluster,
    prompts: Sequence[Prompt],
    responses: int,
    sampling: SamplingConfig,
    seed: int,
    answering: Answering,
    on_failure: OnFailure,
    *,
    first_group: int = 0,
) -> Answers:
    """Return scored trajectories, `responses` for each prompt, in the order of the prompts.

    Scoring runs in parallel with sampling. Seeds of requests are derived from `seed`. `on_failure`
    is called for each reward or environment that fails; if it raises, the sampling ends at once.
    Each prompt makes a group; groups are numbered from `first_group` in the prompts' order.
    """
    asking = Asking(cluster.ask, responses, sampling, answering.submit, on_failure)
    journal = answering.journal.under(seed, responses, sampling.temperature)
    together = cluster.responses_per_request()
    if answering.environments is not None:
        floor = Floor(answering.environments, asking, answering.source)
        groups = play_groups(floor, prompts, seed, first_group, together, journal)
    else:
        groups = _answer_parts(asking, prompts, seed, first_group, together, journal)
    return _join(converse(cluster, answering.loop, groups))


async def _answer_parts(
    asking: Asking,
    prompts: Sequence[Prompt],
    seed: int,
    first_group: int,
    together: int,
    journal: GroupJournal,
) -> list[Scored]:
    """Answer prompts in requests of about `together` responses; return each request's groups."""
    size = max(1, together // asking.responses)
    firsts = range(0, len(prompts), size)
    seeds = derive_seeds(seed, len(firsts))
    return await side_by_side(
        answer(asking, prompts[i : i + size], seeds[n], first_group + i, journal.under(n))
        for n, i in enumerate(firsts)
    )


async def answer(
    asking: Asking, prompts: Sequence[Prompt], seed: int, group: int, journal: GroupJournal
) -> Scored:
    """Return the scored trajectories of a request, whose groups are numbered from `group`.

    Those of the journal are not sampled again.
    """
    limits = _limits(prompts, asking.sampling)
    request = Request(tuple(prompts), asking.responses, asking.sampling, seed, limits)
    if (found := journal.find(request.each_prompt())) is not None:
        return found
    sampled = await asking.ask(request, next(EPISODES))
    numbered = [replace(t, group=group + i // asking.responses) for i, t in enumerate(sampled)]
    scored = await wrap_future(asking.submit(numbered, asking.on_failure))
    journal.keep(scored)
    return scored


def _join(scored: Sequence[Scored]) -> Answers:
    return Answers(
        [trajectory for group in scored for trajectory in group.trajectories],
        [failure for group in scored for failure in group.failures],
    )


def _limits(prompts: Sequence[Prompt], sampling: SamplingConfig) -> tuple[int, ...] | None:
    if all(prompt.max_new_tokens is None for prompt in prompts):
        return None
    return tuple(prompt.max_new_tokens or sampling.max_new_tokens for prompt in prompts)
