"""Turns that are sampled together: the same ones in every run, whatever environments take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.rl.episodes import Rounds
from plimsoll.sampler.protocol import Request

SAMPLING = SamplingConfig(max_new_tokens=8)


class Engine:
    """Answers each prompt with its own number, and notes what it was asked for together."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, tuple[int, ...] | None]] = []

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        numbers = [prompt.index for prompt in request.prompts]
        self.asked.append((numbers, request.seed, request.limits))
        await asyncio.sleep(0)
        return [_answer(prompt) for prompt in request.prompts]


def _answer(prompt: Prompt) -> Trajectory:
    tokens = np.array([prompt.index], np.int64)
    return single_turn(prompt, 0, tokens, np.zeros(1, np.float32), "", "stop", 0)


async def played(
    turns: Sequence[int], waits: Sequence[float], at_once: int
) -> tuple[list[tuple[list[int], int, tuple[int, ...] | None]], list[list[int]]]:
    """Episodes of so many turns, each of which waits so many seconds before each of its turns."""
    engine = Engine()
    rounds = Rounds(engine.ask, at_once, 11, len(turns), places=len(turns))

    async def episode(number: int) -> list[int]:
        found = []
        for turn in range(turns[number]):
            await asyncio.sleep(waits[number])
            prompt = Prompt(number, np.array([1]), "")
            request = Request((prompt,), 1, SAMPLING, turn, (number + 1,))
            [answer] = await rounds.ask(request, number)
            found.append(int(answer.response_tokens[0]))
        rounds.end()
        return found

    answers = await asyncio.gather(*map(episode, range(len(turns))))
    return engine.asked, answers


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.001])), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_every_episode_gets_its_own_answers_whatever_it_waits_for(
    episodes: list[tuple[int, float]], at_once: int
) -> None:
    turns, waits = zip(*episodes, strict=True)
    asked, answers = asyncio.run(played(turns, waits, at_once))
    assert answers == [[number] * count for number, count in enumerate(turns)]
    assert max(len(numbers) for numbers, _, _ in asked) <= at_once
    without, _ = asyncio.run(played(turns, [0.0] * len(turns), at_once))
    assert sorted(asked) == sorted(without)


def test_a_round_begins_when_all_wait_and_each_keeps_its_limit() -> None:
    asked, _ = asyncio.run(played([2, 1], [0.0, 0.01], at_once=8))
    assert [(numbers, limits) for numbers, _, limits in asked] == [([0, 1], (1, 2)), ([0], (1,))]
    assert asked[0][1] != asked[1][1]


def test_one_that_gives_up_keeps_nobody_waiting() -> None:
    engine = Engine()
    rounds = Rounds(engine.ask, 8, 0, episodes=2, places=2)

    async def impatient() -> None:
        request = Request((Prompt(0, np.array([1]), ""),), 1, SAMPLING, 0)
        try:
            async with asyncio.timeout(0.01):
                await rounds.ask(request, 0)
        finally:
            rounds.end()

    async def slow() -> int:
        await asyncio.sleep(0.05)
        request = Request((Prompt(1, np.array([1]), ""),), 1, SAMPLING, 0)
        [answer] = await rounds.ask(request, 1)
        return int(answer.response_tokens[0])

    async def both() -> tuple[object, object]:
        return await asyncio.gather(impatient(), slow(), return_exceptions=True)

    ended, answer = asyncio.run(both())
    assert isinstance(ended, TimeoutError) and answer == 1
    assert [numbers for numbers, _, _ in engine.asked] == [[1]]
