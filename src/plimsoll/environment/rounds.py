"""Sample turns together, for engines that want many prompts at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import groupby

from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import Ask, Request, derive_seeds


@dataclass(frozen=True)
class _WaitingTurn:
    stop: tuple[str, ...]
    episode: int
    request: Request
    answer: asyncio.Future[list[Trajectory]]


class Rounds:
    """A collector of the turns that episodes ask for, each of one prompt and one response.

    It asks the engine when every episode under way waits for a turn. So what is sampled together is
    the same in every run, however long environments take; a slow one keeps the others waiting.
    Turns with stop strings of their own are sampled apart.
    """

    def __init__(self, ask: Ask, at_once: int, seed: int, episodes: int, places: int) -> None:
        """Begin with no turn waiting.

        Args:
            ask: asks the engine.
            at_once: the most prompts in one request.
            seed: of the first round.
            episodes: the number of episodes that will be played.
            places: how many of them are played at the same time.
        """
        self._ask, self._at_once = ask, at_once
        self._seeds = [seed]
        self._left, self._places = episodes, places
        self._waiting: list[_WaitingTurn] = []
        self._asking: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Note that an episode has ended, for good."""
        self._left -= 1
        self._begin_round()

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Answer as an `Ask`."""
        answer: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingTurn(request.sampling.stop, episode, request, answer))
        self._begin_round()
        try:
            return await answer
        except asyncio.CancelledError:
            self._waiting = [turn for turn in self._waiting if turn.answer is not answer]
            raise

    def _begin_round(self) -> None:
        if not self._waiting or len(self._waiting) < min(self._left, self._places):
            return
        waiting = sorted(self._waiting, key=lambda turn: (turn.stop, turn.episode))
        self._waiting = []
        size = self._at_once
        alike = [list(turns) for _, turns in groupby(waiting, key=lambda turn: turn.stop)]
        parts = [turns[i : i + size] for turns in alike for i in range(0, len(turns), size)]
        self._seeds = derive_seeds(self._seeds[-1], len(parts) + 1)
        for part, seed in zip(parts, self._seeds, strict=False):
            task = asyncio.get_running_loop().create_task(self._sample(part, seed))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _sample(self, turns: list[_WaitingTurn], seed: int) -> None:
        requests = [turn.request for turn in turns]
        whole = Request(
            tuple(prompt for request in requests for prompt in request.prompts),
            1,
            requests[0].sampling,
            seed,
            tuple(most for request in requests for most in request.most_tokens()),
        )
        samples = await self._ask(whole, turns[0].episode)
        for turn, sample in zip(turns, samples, strict=True):
            if not turn.answer.done():  # who asked may have given up
                turn.answer.set_result([sample])
