"""Turns sampled together, for engines that want many prompts at once."""

from __future__ import annotations

import asyncio
from itertools import groupby

from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import Ask, Request, derive_seeds

_Waiting = tuple[int, Request, asyncio.Future[list[Trajectory]]]


class Rounds:
    """Collects the turns that episodes ask for, each of one prompt and one response, and asks for
    them at once when every episode that is under way waits for one.

    So what is sampled together is the same in every run, whatever environments take; a slow one
    keeps the others waiting. Turns with stop strings of their own are sampled apart. ask: the
    engine. at_once: prompts in one request, at most. seed: of the first round. episodes: that will
    be played; places: how many of them at the same time.
    """

    def __init__(self, ask: Ask, at_once: int, seed: int, episodes: int, places: int) -> None:
        self._ask, self._at_once = ask, at_once
        self._seeds = [seed]
        self._left, self._places = episodes, places
        self._waiting: list[_Waiting] = []
        self._asking: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Another episode has ended, for good."""
        self._left -= 1
        self._begin_round()

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """An `Ask`."""
        answer: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, request, answer))
        self._begin_round()
        try:
            return await answer
        except asyncio.CancelledError:
            self._waiting = [one for one in self._waiting if one[2] is not answer]
            raise

    def _begin_round(self) -> None:
        if not self._waiting or len(self._waiting) < min(self._left, self._places):
            return
        waiting = sorted(self._waiting, key=lambda one: (one[1].sampling.stop, one[0]))
        self._waiting = []
        size = self._at_once
        alike = [list(own) for _, own in groupby(waiting, key=lambda one: one[1].sampling.stop)]
        parts = [own[i : i + size] for own in alike for i in range(0, len(own), size)]
        self._seeds = derive_seeds(self._seeds[-1], len(parts) + 1)
        for part, seed in zip(parts, self._seeds, strict=False):
            task = asyncio.get_running_loop().create_task(self._sample(part, seed))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _sample(self, waiting: list[_Waiting], seed: int) -> None:
        requests = [request for _, request, _ in waiting]
        whole = Request(
            tuple(prompt for request in requests for prompt in request.prompts),
            1,
            requests[0].sampling,
            seed,
            tuple(most for request in requests for most in request.most_tokens()),
        )
        found = await self._ask(whole, waiting[0][0])
        for (_, _, answer), trajectory in zip(waiting, found, strict=True):
            if not answer.done():  # who asked may have given up
                answer.set_result([trajectory])
