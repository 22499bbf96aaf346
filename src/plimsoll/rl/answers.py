"""Prompts to scored responses: single ones, or episodes with an environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from itertools import groupby

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.score import OnFailure, RewardFailure, Scored
from plimsoll.rl.episodes import Environments, Submit, play_groups
from plimsoll.rl.failed_groups import Note
from plimsoll.rollout.protocol import Request, derive_seeds


@dataclass(frozen=True)
class Answering:
    """How sampled responses are scored.

    Attributes:
        submit: begins to score responses.
        note: shows a line while the run goes on.
        environments: what plays episodes; None: each response stands alone.
        source: where the prompts come from, as the config calls it.
    """

    submit: Submit
    note: Note
    environments: Environments | None = None
    source: str = "data.train"


@dataclass(frozen=True)
class Answers:
    """Scored responses, in the order of their prompts, and the failures of the others."""

    trajectories: list[Trajectory]
    failures: list[RewardFailure]

    def whole_groups(self) -> list[list[Trajectory]]:
        """Return the groups of which no reward failed."""
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
    """Return responses to each prompt, in the prompts' order, scored side by side as they come.

    Each request's seed is made from `seed`. `on_failure` is called with rewards and environments
    that fail; what it raises ends the sampling at once. The first prompt's group has the number
    `first_group`, and the others follow in the prompts' order.
    """
    if answering.environments is not None:
        scored = play_groups(
            *(cluster, answering.environments, prompts, responses, sampling, seed),
            *(answering.submit, on_failure, answering.source, first_group),
        )
        return _join(scored)
    size = max(1, cluster.responses_per_request() // responses)
    parts = [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    seeds = derive_seeds(seed, len(parts))
    requests = [
        Request(part, responses, sampling, request_seed, limits=_limits(part, sampling))
        for part, request_seed in zip(parts, seeds, strict=True)
    ]
    futures: dict[int, Future[Scored]] = {}
    try:
        for place, done in cluster.generate(requests):
            first = first_group + place * size
            numbered = [replace(t, group=first + i // responses) for i, t in enumerate(done)]
            futures[place] = answering.submit(numbered, on_failure)
            _raise_first(future for future in futures.values() if future.done())
        _raise_first(wait(futures.values(), return_when=FIRST_EXCEPTION).done)
        scored = [futures[place].result() for place in sorted(futures)]
    except BaseException:  # Ctrl-C, too
        for future in futures.values():
            future.cancel()
        raise
    return _join(scored)


def _raise_first(ended: Iterable[Future[Scored]]) -> None:
    for future in ended:
        future.result()


def _join(scored: Sequence[Scored]) -> Answers:
    return Answers(
        [trajectory for group in scored for trajectory in group.trajectories],
        [failure for group in scored for failure in group.failures],
    )


def _limits(prompts: Sequence[Prompt], sampling: SamplingConfig) -> tuple[int, ...] | None:
    if all(prompt.max_new_tokens is None for prompt in prompts):
        return None
    return tuple(prompt.max_new_tokens or sampling.max_new_tokens for prompt in prompts)
