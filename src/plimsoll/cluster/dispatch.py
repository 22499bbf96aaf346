"""Choose the engine for each request, and when to send it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plimsoll.records import Trajectory
from plimsoll.sampler.protocol import Request


@dataclass(frozen=True)
class Call:
    """One call of an engine's `generate`.

    Attributes:
        place: The index of the request among all requests.
        engine: The engine's number.
        request: The request; or one response of it, if engines want one response a call.
    """

    place: int
    engine: int
    request: Request

    @property
    def responses(self) -> int:
        """The number of responses that the engine owes for the call."""
        return _owed_for(self.request)


class Dispatch:
    """Deals requests out to engines, in order, as fast as the engines answer them.

    The next request goes to the engine that owes the fewest responses. All its responses come from
    this engine, so that the prompt is computed once and then found in the prefix cache. The choice
    does not change samples: a response's seed follows from its request and its number.

    Args:
        requests: All requests.
        engines: The number of engines.
        at_once: The responses that an engine works on at once. An engine gets requests until it
            owes more than that, so that it never waits for the next.
        per_call: The responses that an engine wants in one call. If it is 1, each response is a
            separate call.
    """

    def __init__(
        self, requests: Sequence[Request], engines: int, at_once: int, per_call: int
    ) -> None:
        self._waiting = deque(enumerate(requests))
        self._requests = tuple(requests)
        self._owed = [0] * engines
        self._at_once = at_once
        self._per_call = per_call
        self._answers: dict[int, list[list[Trajectory]]] = {}

    def calls(self) -> Iterator[Call]:
        """Yield the calls to make now, and count their responses as owed."""
        while self._waiting:
            engine = _least_busy(self._owed)
            if self._owed[engine] > self._at_once:
                return
            place, request = self._waiting.popleft()
            for part in _parts(request, self._per_call):
                call = Call(place, engine, part)
                self._owed[engine] += call.responses
                yield call

    def note_answers(self, call: Call, answers: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Store the answers to a call; return all answers to its request once they are complete.

        They are sorted by prompt, then by number. The result is None while some are missing.
        """
        self._owed[call.engine] -= call.responses
        request = self._requests[call.place]
        by_prompt = self._answers.setdefault(call.place, [[] for _ in request.prompts])
        for i, collected in enumerate(by_prompt):
            new_answers = answers[i * call.request.responses : (i + 1) * call.request.responses]
            # All answers share the request's prompt instead of a copy each.
            collected += [replace(answer, prompt=request.prompts[i]) for answer in new_answers]
        if any(len(collected) < request.responses for collected in by_prompt):
            return None
        del self._answers[call.place]
        return [
            answer
            for collected in by_prompt
            for answer in sorted(collected, key=lambda t: t.sample_index)
        ]


def _owed_for(request: Request) -> int:
    return len(request.prompts) * request.responses


def _least_busy(owed: Sequence[int]) -> int:
    return min(range(len(owed)), key=owed.__getitem__)


def _parts(request: Request, per_call: int) -> Iterator[Request]:
    if per_call > 1:
        yield request
        return
    for number in range(request.responses):
        yield replace(request, responses=1, first=request.first + number)


_REMEMBERED = 100_000
"""How many episodes keep their engine; the ones that asked longest ago are forgotten."""


class EpisodeEngines:
    """Chooses the engine that serves each episode, and measures how long engines serve any.

    An episode's first turn goes to the engine that owes the fewest responses. Later turns go to the
    same engine, because its prefix cache holds the earlier turns.
    """

    def __init__(self, engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._owed = [0] * engines
        self._engine_of: dict[int, int] = {}
        self._clock = clock
        self._since = [0.0] * engines
        self._busy = [0.0] * engines

    @contextmanager
    def serve(self, episode: int, request: Request) -> Iterator[int]:
        """Yield the number of the episode's engine; it owes the request's answers in the block."""
        engine = self._engine_of.pop(episode, None)
        engine = _least_busy(self._owed) if engine is None else engine
        self._engine_of[episode] = engine
        if len(self._engine_of) > _REMEMBERED:
            del self._engine_of[next(iter(self._engine_of))]
        responses = _owed_for(request)
        if self._owed[engine] == 0:
            self._since[engine] = self._clock()
        self._owed[engine] += responses
        try:
            yield engine
        finally:
            self._owed[engine] -= responses
            if self._owed[engine] == 0:
                self._busy[engine] += self._clock() - self._since[engine]

    def busy_seconds(self) -> list[float]:
        """Return for each engine the seconds so far in which it owed any answer."""
        now = self._clock()
        return [
            busy + (now - since if owed else 0.0)
            for busy, since, owed in zip(self._busy, self._since, self._owed, strict=True)
        ]
