"""Prompts to requests and back, over a cluster that answers in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from background_loop import LOOP
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import DynamicSampling
from plimsoll.errors import PlimsollError
from plimsoll.jobs.which import spec_of
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.score import OnFailure, RewardFailure, Scored
from plimsoll.rl.answers import Answering, FailedGroups
from plimsoll.rl.sampling import Draw, Sampled, probe_sequences, sample, teaches
from plimsoll.sampler.protocol import Request, derive_seeds


@dataclass
class PlainCluster:
    """Answers each prompt with the seed that it was given, the last request first."""

    at_once: int
    requests: list[Request] = field(default_factory=list)

    def responses_per_request(self) -> int:
        return self.at_once

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        self.requests.append(request)
        await asyncio.sleep(0.01 / len(self.requests))
        return [
            answer(prompt, number, seed)
            for prompt, seed in zip(request.prompts, request.seeds(), strict=True)
            for number in range(request.responses)
        ]

    def wait_for(self, future: Future[Any]) -> Any:
        return future.result()


def answer(prompt: Prompt, number: int, seed: int) -> Trajectory:
    logprobs = np.zeros(1, dtype=np.float32)
    return single_turn(prompt, number, np.array([seed]), logprobs, "", "stop", 0)


def prompts(*indices: int) -> list[Prompt]:
    return [Prompt(i, np.array([1, 2]), str(i)) for i in indices]


def config(
    responses: int,
    prompts: int = 4,
    dynamic: dict[str, float] | None = None,
    advantage: str = "reinforce",
) -> RunSpec[RlConfig]:
    batch = {"prompts": prompts, "responses": responses, "dynamic_sampling": dynamic}
    found = RlConfig.model_validate(
        {
            "run": {"directory": "runs/x", "steps": 2, "seed": 5},
            "data": {"train": {"path": "x.jsonl", "prompt": "p"}},
            "batch": batch,
            "actor": {"model": {"path": "m"}},
            "rewards": {"r": {"name": "length"}},
            "algorithm": {"advantage": {"name": advantage}},
        }
    )
    return spec_of(found)


def submit(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
    """Scores at once; prompts over 1000 have a reward that fails."""
    failures = [
        RewardFailure(
            t.group, t.prompt.index, "r", f"The reward 'r', at row {t.prompt.index}", " raised", ""
        )
        for t in trajectories
        if t.prompt.index > 1000 and t.sample_index == 0
    ]
    for failure in failures:
        on_failure(failure)
    failed = {failure.group for failure in failures}
    whole = [t for t in trajectories if t.group not in failed or t.sample_index > 0]
    return at_once(scored(whole), failures)


def at_once(
    trajectories: Sequence[Trajectory], failures: Sequence[RewardFailure] = ()
) -> Future[Scored]:
    future: Future[Scored] = Future()
    future.set_result(Scored(tuple(trajectories), tuple(failures)))
    return future


def scored(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [
        replace(t, rewards=(RewardPart("r", float(t.prompt.index + t.sample_index), weight=2.0),))
        for t in trajectories
    ]


def drawn_from(asked: Sequence[Prompt]) -> Draw:
    """Prompts one after the other; none twice, and none left out."""
    place = 0

    def draw(first: int, count: int) -> list[Prompt]:
        nonlocal place
        assert first == place and count > 0
        place += count
        return list(asked[first : first + count])

    return draw


def ask(cluster: PlainCluster, responses: int, asked: list[Prompt], step: int) -> list[Trajectory]:
    spec = config(responses, prompts=len(asked))
    found = sample(
        cast(Cluster, cluster), spec, drawn_from(asked), step, Answering(LOOP, submit, print)
    )
    assert found.greedy == [] and found.prompts == len(asked)
    assert found.metrics == {"groups/drawn": len(asked), "groups/idle": 0, "groups/failed": 0}
    return found.trajectories


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 9))
def test_trajectories_come_in_the_order_of_the_prompts(
    indices: list[int], responses: int, at_once: int
) -> None:
    cluster = PlainCluster(at_once)
    found = ask(cluster, responses, prompts(*indices), step=1)
    expected = [(index, number) for index in indices for number in range(responses)]
    assert [(t.prompt.index, t.sample_index) for t in found] == expected
    assert all(t.reward == 2 * (t.prompt.index + t.sample_index) for t in found)
    sizes = [len(r.prompts) * r.responses for r in cluster.requests]
    assert all(size <= max(at_once, responses) for size in sizes)
    # A prompt that an epoch's end brings twice into a step is sampled twice, in two groups.
    assert len({int(t.response_tokens[0]) for t in found}) == len(indices)
    groups = [found[i : i + responses] for i in range(0, len(found), responses)]
    assert all(len({t.group for t in own}) == 1 for own in groups)
    assert len({t.group for t in found}) == len(indices)


def test_prompts_take_their_own_limits_to_the_engines() -> None:
    own, most = {1: 7, 2: 9}, config(1).config.rollout.sampling.max_new_tokens
    asked = [replace(p, max_new_tokens=own.get(p.index)) for p in prompts(0, 1, 2, 3, 4)]
    cluster = PlainCluster(at_once=3)
    ask(cluster, 1, asked, step=1)
    assert [request.limits for request in cluster.requests] == [(most, 7, 9), None]


def test_a_step_can_be_sampled_again_and_others_have_other_seeds() -> None:
    def seeds(step: int) -> list[int]:
        found = ask(PlainCluster(1), 1, prompts(3, 4), step)
        return [int(t.response_tokens[0]) for t in found]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_the_seeds_of_a_step_are_what_they_were() -> None:
    """They depend on the run's seed and the step alone, so an earlier run is sampled again as it
    was."""
    cluster = PlainCluster(1)
    ask(cluster, 1, prompts(3, 4), step=7)
    seed = int(np.random.SeedSequence([5, 7]).generate_state(1)[0])
    assert [r.seed for r in cluster.requests] == derive_seeds(seed, 2)


def by_rewards(rewards: Sequence[Sequence[float]]) -> Callable[..., Future[Scored]]:
    """rewards: of the responses to each prompt, by its index."""

    def scorer(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
        return at_once(
            [
                replace(t, rewards=(RewardPart("r", rewards[t.prompt.index][t.sample_index]),))
                for t in trajectories
            ]
        )

    return scorer


def sampled(
    rewards: Sequence[Sequence[float]], at_once: int = 2, **dynamic: float
) -> tuple[Sampled, PlainCluster]:
    """Two prompts a step, of two responses each; prompts number 0, 1, 2, ..."""
    cluster = PlainCluster(at_once)
    asked = prompts(*range(len(rewards)))
    found = sample(
        cast(Cluster, cluster),
        config(2, prompts=2, dynamic=dynamic),
        drawn_from(asked),
        1,
        Answering(LOOP, by_rewards(rewards), print),
    )
    groups = [found.trajectories[i : i + 2] for i in range(0, len(found.trajectories), 2)]
    assert all(len({t.group for t in own}) == 1 for own in groups)
    assert len({own[0].group for own in groups}) == len(groups)
    assert all(t.group == t.prompt.index for t in found.trajectories)
    return found, cluster


def kept(found: Sampled) -> list[int]:
    return [t.prompt.index for t in found.trajectories[::2]]


def idle_groups(found: Sampled) -> int:
    return round(found.metrics["groups/idle"] * found.prompts)


IDLE, TEACHING = (1.0, 1.0), (0.0, 1.0)


def test_groups_that_teach_nothing_are_replaced_in_the_order_of_the_prompts() -> None:
    found, cluster = sampled([IDLE, TEACHING, IDLE, TEACHING, TEACHING])
    assert kept(found) == [1, 3]
    assert (found.prompts, idle_groups(found)) == (4, 2)
    assert found.metrics == {"groups/drawn": 4, "groups/idle": 0.5, "groups/failed": 0}
    seeds = [seed for r in cluster.requests for seed in r.seeds()]
    assert len(set(seeds)) == len(seeds) == 4  # of further rounds, others


def test_a_step_without_idle_groups_draws_no_more() -> None:
    found, cluster = sampled([TEACHING, TEACHING, TEACHING])
    assert (kept(found), found.prompts, idle_groups(found)) == ([0, 1], 2, 0)
    plain = PlainCluster(2)
    sample(
        cast(Cluster, plain),
        config(2, prompts=2),
        drawn_from(prompts(0, 1)),
        1,
        Answering(LOOP, submit, print),
    )
    assert [r.seed for r in cluster.requests] == [r.seed for r in plain.requests]


def test_drawing_is_bounded_and_idle_groups_make_up_the_number() -> None:
    found, _ = sampled([IDLE, IDLE, IDLE, TEACHING, IDLE, IDLE, TEACHING], max_drawn=3.0)
    # two, then two, then one after the other, up to 3 * 2
    assert found.prompts == 6
    assert kept(found) == [0, 3] and idle_groups(found) == 5


def test_oversampling_asks_for_more_at_once_and_takes_the_first() -> None:
    found, _ = sampled([IDLE, TEACHING, TEACHING, TEACHING], oversampling=2.0)
    assert (kept(found), found.prompts, idle_groups(found)) == ([1, 2], 4, 1)


def test_oversampling_goes_over_no_bound() -> None:
    found, _ = sampled([IDLE] * 10, oversampling=5.0, max_drawn=2.5)
    assert (kept(found), found.prompts, idle_groups(found)) == ([0, 1], 5, 5)


@given(
    st.lists(st.sampled_from([IDLE, TEACHING]), min_size=40, max_size=40),
    st.floats(1, 4),
    st.floats(1, 6),
    st.integers(1, 8),
)
def test_the_first_groups_that_teach_are_taken(
    rewards: list[tuple[float, float]], oversampling: float, max_drawn: float, at_once: int
) -> None:
    found, _ = sampled(rewards, at_once, oversampling=oversampling, max_drawn=max_drawn)
    assert 2 <= found.prompts <= 2 * max_drawn
    drawn = range(found.prompts)
    teaching = [i for i in drawn if rewards[i] == TEACHING]
    idle = [i for i in drawn if rewards[i] == IDLE]
    assert kept(found) == sorted([*teaching, *idle][:2])
    assert idle_groups(found) == len(idle)
    if len(teaching) < 2:
        assert found.prompts == int(2 * max_drawn)


@pytest.mark.parametrize(
    ("rewards", "low", "high", "expected"),
    [
        ([0.0, 1.0], None, None, True),
        ([1.0, 1.0], None, None, False),
        ([0.0, 0.2], 0.1, None, False),  # strictly between
        ([0.0, 0.4], 0.1, 0.9, True),
        ([0.8, 1.0], None, 0.9, False),
    ],
)
def test_what_teaches(
    rewards: list[float], low: float | None, high: float | None, expected: bool
) -> None:
    given = [answer(prompts(0)[0], i, 0) for i in range(2)]
    group = by_rewards([rewards])(given, FailedGroups(print))
    assert teaches(group.result().trajectories, DynamicSampling(low=low, high=high)) is expected


# Right is worth 1, and a length penalty of its own is beside it. All right or all wrong, the sums
# differ by the penalty alone:
#   right     penalty    sum         by the sum   by right
#   1  1      0 -0.5     1    0.5    teaches      idle
#   0  0      0 -1       0   -1      teaches      idle
#   0  1      0 -1       0    0      idle         teaches
@pytest.mark.parametrize(
    ("right", "penalty", "by_sum", "by_right"),
    [
        ([1.0, 1.0], [0.0, -0.5], True, False),
        ([0.0, 0.0], [0.0, -1.0], True, False),
        ([0.0, 1.0], [0.0, -1.0], False, True),
    ],
)
def test_a_group_is_looked_at_by_one_part_of_the_reward(
    right: list[float], penalty: list[float], by_sum: bool, by_right: bool
) -> None:
    group = [
        replace(
            answer(prompts(0)[0], i, 0),
            rewards=(RewardPart("overlong", penalty[i]), RewardPart("right", right[i])),
        )
        for i in range(2)
    ]
    assert teaches(group, DynamicSampling()) is by_sum
    assert teaches(group, DynamicSampling(by="right")) is by_right
    # The bounds are of the part, too: the mean of right is 0.5.
    assert teaches(group, DynamicSampling(by="right", low=0.5)) is False


def test_only_remax_asks_for_greedy_responses_one_to_each_prompt_it_learns_from() -> None:
    cluster = PlainCluster(8)
    spec = config(2, prompts=2, dynamic={}, advantage="remax")
    rewards = [IDLE, TEACHING, TEACHING]
    found = sample(
        cast(Cluster, cluster),
        spec,
        drawn_from(prompts(0, 1, 2)),
        1,
        Answering(LOOP, by_rewards(rewards), print),
    )
    assert [(t.group, t.prompt.index, t.sample_index) for t in found.greedy] == [
        (1, 1, 0),
        (2, 2, 0),
    ]
    assert all(t.rewards for t in found.greedy)
    *first, last = cluster.requests
    assert [r.sampling.temperature for r in first] == [1.0, 1.0]
    assert (last.sampling.temperature, last.responses) == (0.0, 1)
    assert [p.index for p in last.prompts] == [1, 2]


def test_weight_syncs_are_proved_with_prompts_of_two_tokens_or_more() -> None:
    short = [Prompt(i, np.array([i]), str(i)) for i in (3, 4, 5)]
    long = prompts(*range(20))
    probe = probe_sequences([*short, *long], config(1))
    assert [p.tolist() for p in probe] == [[1, 2]] * 16
    assert [p.tolist() for p in probe_sequences(short, config(1))] == [[3, 5]]
    wide = [Prompt(0, np.arange(500), "0")]
    assert [p.tolist() for p in probe_sequences(wide, config(1))] == [[*range(64)]]
    assert [p.tolist() for p in probe_sequences(short[:1], config(1))] == [[3, 3]]


def test_a_group_for_which_a_reward_fails_is_replaced_and_counted() -> None:
    cluster = PlainCluster(1)
    draw = drawn_from(prompts(1, 2001, 3, 4, 5))
    found = sample(
        cast(Cluster, cluster), config(2, prompts=4), draw, 1, Answering(LOOP, submit, print)
    )
    assert [t.prompt.index for t in found.trajectories] == [1, 1, 3, 3, 4, 4, 5, 5]
    assert [t.group for t in found.trajectories] == [0, 0, 2, 2, 3, 3, 4, 4]
    assert (found.prompts, found.metrics["groups/failed"]) == (5, 1)


def test_a_reward_that_fails_too_often_stops_the_run_and_is_shown() -> None:
    cluster = PlainCluster(1)
    draw = drawn_from(prompts(1, 2001, 2002, 4, 5, 6))
    with pytest.raises(PlimsollError, match=r"^rewards .*2 groups .* 4, ") as error:
        sample(
            cast(Cluster, cluster), config(2, prompts=4), draw, 1, Answering(LOOP, submit, print)
        )
    # The cluster answers the last request first.
    assert "'r', at row 2002 raised" in str(error.value)
