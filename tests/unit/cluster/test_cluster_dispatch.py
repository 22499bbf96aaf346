"""Requests to engines that take their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.dispatch import EngineQueue
from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Prompt
from plimsoll.sampler.protocol import Request


def request(number: int, prompts: int = 1, responses: int = 1) -> Request:
    asked = tuple(Prompt(100 * number + i, np.array([number]), "") for i in range(prompts))
    return Request(asked, responses, SamplingConfig(), seed=number)


@dataclass
class Course:
    """What came of requests that were made all at once.

    begun: the engine of each request, in the order in which they began; owed, most: the responses
    that each engine owes, and the most that any ever owed; end: when all was done, in steps.
    """

    begun: dict[int, int] = field(default_factory=dict)
    owed: list[int] = field(default_factory=list)
    most: int = 0
    end: int = 0


async def run(
    requests: Sequence[Request], engines: int, at_once: int, steps: Sequence[int], slow: int = 1
) -> Course:
    """Each request takes as many steps of the loop as the next of `steps`; in engine 0, `slow`
    times as many."""
    queue, course = EngineQueue(engines, at_once), Course(owed=[0] * engines)

    async def serve(place: int) -> None:
        async with queue.serve(requests[place], place) as engine:
            course.begun[place] = engine
            responses = len(requests[place].prompts) * requests[place].responses
            course.owed[engine] += responses
            course.most = max(course.most, course.owed[engine])
            for _ in range(steps[place % len(steps)] * (1 if engine else slow)):
                await asyncio.sleep(0)
                course.end += 1
            course.owed[engine] -= responses

    async with asyncio.TaskGroup() as group:
        for place in range(len(requests)):
            group.create_task(serve(place))
    return course


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=12),
    st.integers(1, 3),
    st.integers(1, 9),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
)
def test_requests_begin_in_order_and_no_engine_owes_more_than_one_too_many(
    sizes: list[tuple[int, int]], engines: int, at_once: int, steps: list[int]
) -> None:
    requests = [request(i, *size) for i, size in enumerate(sizes)]
    course = asyncio.run(run(requests, engines, at_once, steps))
    assert list(course.begun) == list(range(len(requests)))
    assert course.most <= at_once + max((p * n for p, n in sizes), default=0)
    assert course.owed == [0] * engines


def test_the_next_request_goes_where_the_fewest_responses_are_owed() -> None:
    steps = [9, 1, 9, 9, 9, 9]
    course = asyncio.run(run([request(i, responses=2) for i in range(6)], 2, 2, steps))
    assert [course.begun[place] for place in range(5)] == [0, 1, 0, 1, 1]


def test_nobody_waits_for_the_slowest() -> None:
    course = asyncio.run(run([request(i) for i in range(40)], 2, 1, [4], slow=4))
    assert 8 <= sum(engine == 0 for engine in course.begun.values()) < 12


def test_requests_that_are_given_up_let_the_next_begin() -> None:
    async def talk() -> list[int]:
        queue, begun = EngineQueue(1, 0), list[int]()

        async def serve(place: int) -> None:
            async with queue.serve(request(place), place):
                begun.append(place)
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(serve(place)) for place in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # it waits
        await asyncio.sleep(0)
        tasks[0].cancel()  # it is served
        tasks[2].cancel()  # it is about to be
        for _ in range(3):
            await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    assert asyncio.run(talk()) == [0, 3]


def test_engines_keep_their_episodes_and_are_busy_while_they_owe_an_answer() -> None:
    now = 0.0

    async def talk() -> None:
        nonlocal now
        queue = EngineQueue(2, 16, lambda: now)
        async with queue.serve(request(0), 0) as first:
            now = 2.0
            async with queue.serve(request(1), 1) as second, queue.serve(request(2), 0) as again:
                assert (first, second, again) == (0, 1, 0)
                now = 3.0
                assert queue.busy_seconds() == [3.0, 1.0]
            now = 5.0
        now = 9.0
        assert queue.busy_seconds() == [5.0, 1.0]
        async with queue.serve(request(3), 1) as later:
            assert later == 1

    asyncio.run(talk())
