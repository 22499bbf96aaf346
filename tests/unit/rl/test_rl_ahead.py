"""Groups that are sampled in an event loop: which begin when, and what their failures do."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from plimsoll.errors import PlimsollError
from plimsoll.records import Prompt, single_turn
from plimsoll.reward.score import RewardFailure, Scored
from plimsoll.rl.ahead import GroupBuffer, GroupStream

TOKENS = np.zeros(1, np.int64)


class Sampling:
    """Groups that end when a test says so."""

    def __init__(self) -> None:
        self.open: dict[int, asyncio.Future[Scored]] = {}
        self.begun: list[tuple[int, int]] = []

    async def __call__(self, place: int, version: int) -> Scored:
        self.begun.append((place, version))
        self.open[place] = asyncio.get_running_loop().create_future()
        return await self.open[place]

    def end(self, *places: int) -> None:
        for place in places:
            version = dict(self.begun)[place]
            prompt = Prompt(place, TOKENS, "?")
            logprobs = TOKENS.astype(np.float32)
            sampled = single_turn(prompt, 0, TOKENS, logprobs, "", "stop", version, group=place)
            self.open.pop(place).set_result(Scored((sampled,), ()))


async def turns(count: int = 5) -> None:
    """Let tasks run that wait for nothing."""
    for _ in range(count):
        await asyncio.sleep(0)


def stream(sampling: Sampling, again: tuple[int, ...] = ()) -> GroupStream:
    return GroupStream(GroupBuffer(2, 1, 9, 99, 0, next_place=len(again), again=again), sampling)


def test_groups_begin_with_room_and_with_new_weights() -> None:
    async def talk() -> None:
        sampling = Sampling()
        groups = stream(sampling)
        await groups.renew(0)
        await turns()
        assert sampling.begun == [(place, 0) for place in range(4)]
        taking = asyncio.create_task(groups.take(2))
        sampling.end(3)
        await turns()
        assert not taking.done()
        sampling.end(1)
        assert [group.place for group in await taking] == [1, 3]
        before, after = await groups.advance()
        await turns()
        assert (before.dropped, after.unlearned, after.settled) == (0, (0, 2), 2)
        assert len(sampling.begun) == 4
        await groups.renew(1)
        await turns()
        assert sampling.begun[4:] == [(4, 1), (5, 1)]
        await groups.end()
        assert all(future.cancelled() for future in sampling.open.values())

    asyncio.run(talk())


def test_prompts_that_were_not_learned_from_come_first() -> None:
    async def talk() -> None:
        sampling = Sampling()
        groups = stream(sampling, again=(0, 1, 2))
        await groups.renew(0)
        await turns()
        assert [place for place, _ in sampling.begun] == [0, 1, 2, 3]
        await groups.end()

    asyncio.run(talk())


def test_a_group_that_fails_is_replaced() -> None:
    async def talk() -> None:
        sampling = Sampling()
        groups = stream(sampling)
        await groups.renew(0)
        await turns()
        failure = RewardFailure(0, 0, "mine", "", "", "")
        sampling.open.pop(0).set_result(Scored((), (failure,)))
        await turns()
        assert sampling.begun[4:] == [(4, 0)]
        sampling.end(4, 1)
        assert [group.place for group in await groups.take(2)] == [1, 4]
        await groups.end()

    asyncio.run(talk())


def test_an_error_of_a_group_ends_the_wait_for_others() -> None:
    async def talk() -> None:
        sampling = Sampling()
        groups = stream(sampling)
        await groups.renew(0)
        await turns()
        taking = asyncio.create_task(groups.take(2))
        await turns()
        sampling.open.pop(2).set_exception(PlimsollError("too many groups failed"))
        with pytest.raises(PlimsollError, match="too many"):
            await taking
        sampling.end(0, 1)
        await turns()
        with pytest.raises(PlimsollError, match="too many"):
            await groups.take(2)
        await groups.end()

    asyncio.run(talk())


def test_a_group_that_is_cancelled_ends_the_wait_for_others() -> None:
    async def talk() -> None:
        sampling = Sampling()
        groups = stream(sampling)
        await groups.renew(0)
        await turns()
        sampling.open[1].cancel()
        with pytest.raises(PlimsollError, match="group 1 was cancelled"):
            await groups.take(2)
        await groups.end()

    asyncio.run(talk())
