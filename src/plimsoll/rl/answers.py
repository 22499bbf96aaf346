"""Prompts to scored responses: single ones, or episodes with an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.score import RewardFailure, Scored
from plimsoll.rl.episodes import Environments, play_groups
from plimsoll.rollout.protocol import Request, derive_seeds

Submit = Callable[[Sequence[Trajectory]], Future[Scored]]
"""Begins to score; see `Scorer.submit`."""


@dataclass(frozen=True)
class Answering:
    """What is done with what is sampled. submit: begins to score it. environments: that go on with
    it; None: each response stands alone. source: of the prompts, as the config calls it."""

    submit: Submit
    environments: Environments | None = None
    source: str = "data.train"


@dataclass(frozen=True)
class Answers:
    """Scored responses, in the order of their prompts, and the failures of those that are not."""

    trajectories: list[Trajectory]
    failures: list[RewardFailure]

    def whole_groups(self) -> list[list[Trajectory]]:
        """Those of which no reward failed."""
        failed = {failure.group for failure in self.failures}
        kept = [t for t in self.trajectories if t.group not in failed]
        return [list(group) for _, group in groupby(kept, key=lambda t: t.group)]

    def all_of_them(self) -> list[Trajectory]:
        """Raises PlimsollError for the first that a reward failed for."""
        if self.failures:
            raise self.failures[0].error()
        return self.trajectories


def answers(
    cluster: Cluster,
    prompts: Sequence[Prompt],
    responses: int,
    sampling: SamplingConfig,
    seed: int,
    answering: Answering,
    *,
    first_group: int = 0,
) -> Answers:
    """Responses to each prompt, in the prompts' order, scored side by side as they come. Groups are
    numbered by the prompts' places, from the first on."""
    if answering.environments is not None:
        scored = play_groups(
            *(cluster, answering.environments, prompts, responses, sampling, seed),
            *(answering.submit, answering.source, first_group),
        )
        return _gathered(scored)
    size = max(1, cluster.responses_per_request() // responses)
    parts = [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    seeds = derive_seeds(seed, len(parts))
    requests = [
        Request(part, responses, sampling, own, limits=_limits(part, sampling))
        for part, own in zip(parts, seeds, strict=True)
    ]
    futures: dict[int, Future[Scored]] = {}
    try:
        for place, done in cluster.generate(requests):
            first = first_group + place * size
            numbered = [replace(t, group=first + i // responses) for i, t in enumerate(done)]
            futures[place] = answering.submit(numbered)
        scored = [futures[place].result() for place in sorted(futures)]
    except BaseException:  # Ctrl-C, too
        for future in futures.values():
            future.cancel()
        raise
    return _gathered(scored)


def _gathered(scored: Sequence[Scored]) -> Answers:
    return Answers(
        [trajectory for one in scored for trajectory in one.trajectories],
        [failure for one in scored for failure in one.failures],
    )


def _limits(prompts: Sequence[Prompt], sampling: SamplingConfig) -> tuple[int, ...] | None:
    """The longest response to each prompt; None where no prompt has a limit of its own."""
    if all(prompt.max_new_tokens is None for prompt in prompts):
        return None
    return tuple(prompt.max_new_tokens or sampling.max_new_tokens for prompt in prompts)
