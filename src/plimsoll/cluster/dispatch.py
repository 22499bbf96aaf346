"""Choose the engine for each request, and when to send it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from plimsoll.sampler.protocol import Request

_REMEMBERED = 100_000
"""How many episodes keep their engine; the ones that asked longest ago are forgotten."""


class EngineQueue:
    """Chooses the engine that serves each request, and measures how long engines serve any.

    A request that begins an episode goes to the engine that owes the fewest responses, and waits
    while each owes more than it works on at once; so no engine waits for its next request. All its
    responses come from this engine, and so do those to the episode's later requests, because the
    prefix cache holds what came before. The choice does not change samples: a response's seed
    follows from its request and its number.

    All coroutines are of one event loop.

    Args:
        engines: the number of engines.
        at_once: the responses that an engine works on at once.
        clock: returns the time in seconds.
    """

    def __init__(
        self, engines: int, at_once: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owed = [0] * engines
        self._at_once = at_once
        self._engine_of: dict[int, int] = {}
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        self._clock = clock
        self._since = [0.0] * engines
        self._busy = [0.0] * engines

    @asynccontextmanager
    async def serve(self, request: Request, episode: int) -> AsyncIterator[int]:
        """Yield the number of the episode's engine; it owes the request's answers in the block."""
        responses = len(request.prompts) * request.responses
        engine = self._engine_of.pop(episode, None)
        if engine is None:
            engine = await self._wait_for_engine(responses)
        else:
            self._add(engine, responses)
        self._engine_of[episode] = engine
        if len(self._engine_of) > _REMEMBERED:
            del self._engine_of[next(iter(self._engine_of))]
        try:
            yield engine
        finally:
            self._subtract(engine, responses)

    async def _wait_for_engine(self, responses: int) -> int:
        """Return an engine for a request; it owes the responses already."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, responses))
        self._begin_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._subtract(turn.result(), responses)
            raise

    def _begin_waiting(self) -> None:
        while self._waiting and min(self._owed) <= self._at_once:
            turn, responses = self._waiting.popleft()
            if not turn.done():  # else it was given up
                engine = min(range(len(self._owed)), key=self._owed.__getitem__)
                self._add(engine, responses)
                turn.set_result(engine)

    def _add(self, engine: int, responses: int) -> None:
        if self._owed[engine] == 0:
            self._since[engine] = self._clock()
        self._owed[engine] += responses

    def _subtract(self, engine: int, responses: int) -> None:
        self._owed[engine] -= responses
        if self._owed[engine] == 0:
            self._busy[engine] += self._clock() - self._since[engine]
        self._begin_waiting()

    def busy_seconds(self) -> list[float]:
        """Return for each engine the seconds so far in which it owed any answer."""
        now = self._clock()
        return [
            busy + (now - since if owed else 0.0)
            for busy, since, owed in zip(self._busy, self._since, self._owed, strict=True)
        ]
