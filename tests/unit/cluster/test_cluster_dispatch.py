"""Requests to engines that take their time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.dispatch import Call, Dispatch, EpisodeEngines
from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.sampler.protocol import Request


def request(number: int, prompts: int = 1, responses: int = 1) -> Request:
    asked = tuple(Prompt(100 * number + i, np.array([number]), "") for i in range(prompts))
    return Request(asked, responses, SamplingConfig(), seed=number)


def answers(call: Call) -> list[Trajectory]:
    """With the seed and the number that an engine goes by as its tokens."""
    asked = call.request
    return [
        answer(prompt, asked.first + number, seed + asked.first + number)
        for prompt, seed in zip(asked.prompts, asked.seeds(), strict=True)
        for number in range(asked.responses)
    ]


def answer(prompt: Prompt, number: int, seed: int) -> Trajectory:
    logprobs = np.zeros(1, dtype=np.float32)
    copied = Prompt(prompt.index, prompt.tokens.copy(), prompt.text)  # as from another process
    return single_turn(copied, number, np.array([seed]), logprobs, "", "stop", 0)


@dataclass
class Course:
    """What came of a run of requests: whole requests by their places, calls in their order, the
    most that an engine ever owed, and when all was done."""

    whole: dict[int, list[Trajectory]]
    calls: list[Call]
    most: int
    end: float


def run(work: Dispatch, durations: Sequence[float], speeds: Sequence[float] = (1, 1, 1)) -> Course:
    """Engines work on all that they are asked for at once; a call takes as long as the next of the
    durations, divided by the engine's speed."""
    course, now, running = Course({}, [], 0, 0.0), 0.0, list[tuple[float, int, Call]]()
    while True:
        for call in work.calls():
            lasts = durations[len(course.calls) % len(durations)] / speeds[call.engine]
            heapq.heappush(running, (now + lasts, len(course.calls), call))
            course.calls.append(call)
            owed = sum(c.responses for _, _, c in running if c.engine == call.engine)
            course.most = max(course.most, owed)
        if not running:
            course.end = now
            return course
        now, _, call = heapq.heappop(running)
        whole = work.note_answers(call, answers(call))
        if whole is not None:
            assert call.place not in course.whole
            course.whole[call.place] = whole


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=12),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1, 16]),
    st.lists(st.floats(0.1, 9), min_size=1, max_size=9),
)
def test_every_request_is_answered_once_in_order_with_seeds_of_its_own(
    sizes: list[tuple[int, int]], engines: int, at_once: int, per_call: int, times: list[float]
) -> None:
    requests = [request(i, *size) for i, size in enumerate(sizes)]
    course = run(Dispatch(requests, engines, at_once, per_call), times)
    assert sorted(course.whole) == list(range(len(requests)))
    for place, asked in enumerate(requests):
        [expected] = [answers(Call(place, 0, asked))]
        found = course.whole[place]
        assert [t.sample_index for t in found] == [t.sample_index for t in expected]
        assert [t.response_tokens[0] for t in found] == [t.response_tokens[0] for t in expected]
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.responses)]
        assert all(t.prompt is prompt for t, prompt in zip(found, prompts, strict=True))
        assert len({c.engine for c in course.calls if c.place == place}) == 1
    assert [c.place for c in course.calls] == sorted(c.place for c in course.calls)
    assert course.most <= at_once + max((p * n for p, n in sizes), default=0)


@pytest.mark.parametrize(("per_call", "calls"), [(1, 4), (2, 1)])
def test_responses_come_one_by_one_where_the_engine_takes_them_so(
    per_call: int, calls: int
) -> None:
    work = Dispatch([request(7, responses=4)], 1, 16, per_call)
    asked = list(work.calls())
    assert [c.request.first for c in asked] == list(range(calls))
    assert all(c.request.seed == 7 and c.request.responses == 4 // calls for c in asked)
    *early, last = reversed(asked)
    assert all(work.note_answers(call, answers(call)) is None for call in early)
    assert len(work.note_answers(last, answers(last)) or []) == 4


def test_the_next_request_goes_where_the_fewest_responses_are_owed() -> None:
    work = Dispatch([request(i, responses=2) for i in range(6)], 2, 2, 1)
    first = list(work.calls())
    assert [(c.place, c.engine) for c in first[::2]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    done = [c for c in first if c.engine == 1][:3]
    assert [work.note_answers(call, answers(call)) is not None for call in done] == [
        False,
        True,
        False,
    ]
    assert [(c.place, c.engine) for c in work.calls()] == [(4, 1)] * 2


def test_nobody_waits_for_the_slowest() -> None:
    """Half of 40 requests would last 40 s in the slow engine, which takes two at a time in 4 s."""
    work = Dispatch([request(i) for i in range(40)], 2, 1, 1)
    course = run(work, [1.0], speeds=(0.25, 1))
    slow = sum(call.engine == 0 for call in course.calls)
    assert slow < 12 and course.end <= 20


def test_engines_keep_their_episodes_and_are_busy_while_they_owe_an_answer() -> None:
    now = 0.0
    engines = EpisodeEngines(2, lambda: now)
    with engines.serve(0, request(0)) as first:
        now = 2.0
        with engines.serve(1, request(1)) as second, engines.serve(0, request(2)) as again:
            assert (first, second, again) == (0, 1, 0)
            now = 3.0
            assert engines.busy_seconds() == [3.0, 1.0]
        now = 5.0
    now = 9.0
    assert engines.busy_seconds() == [5.0, 1.0]
    with engines.serve(1, request(3)) as later:
        assert later == 1
