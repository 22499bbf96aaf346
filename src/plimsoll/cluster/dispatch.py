"""Which engine answers which request, and when it is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import Request


@dataclass(frozen=True)
class Call:
    """One call of an engine's `generate`. place: of what it is a part of, among all requests."""

    place: int
    engine: int
    request: Request

    @property
    def responses(self) -> int:
        """That the engine owes for it."""
        return _owed_for(self.request)


class Dispatch:
    """Deals requests out, in their order, as engines get through them.

    The next request goes to the engine that owes the fewest responses; all of it, so that its
    prompt is read once and then found in that engine's prefix cache. at_once: responses that an
    engine works on at once; it is asked for more until it owes so many and one request beyond them,
    for it not to wait for the next. per_call: responses that an engine wants in one call; where
    that is 1, each comes by itself, and counts as done when it comes.

    Which engine answers changes no seed: a response's is its request's and its number's.
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
        """What is to be asked for now."""
        while self._waiting:
            engine = _least_busy(self._owed)
            if self._owed[engine] > self._at_once:
                return
            place, request = self._waiting.popleft()
            for part in _parts(request, self._per_call):
                call = Call(place, engine, part)
                self._owed[engine] += call.responses
                yield call

    def done(self, call: Call, answers: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Note the answers to a call. Those to the whole request, by prompt and then by number,
        where these were the last of them."""
        self._owed[call.engine] -= call.responses
        request = self._requests[call.place]
        kept = self._answers.setdefault(call.place, [[] for _ in request.prompts])
        for i, own in enumerate(kept):
            these = answers[i * call.request.responses : (i + 1) * call.request.responses]
            # One prompt for all, and not a copy with each.
            own += [replace(answer, prompt=request.prompts[i]) for answer in these]
        if any(len(own) < request.responses for own in kept):
            return None
        del self._answers[call.place]
        return [answer for own in kept for answer in sorted(own, key=lambda t: t.sample_index)]


def _owed_for(request: Request) -> int:
    return len(request.prompts) * request.responses


def _least_busy(owed: Sequence[int]) -> int:
    """The first engine that owes the fewest responses."""
    return min(range(len(owed)), key=owed.__getitem__)


def _parts(request: Request, per_call: int) -> Iterator[Request]:
    if per_call > 1:
        yield request
        return
    for number in range(request.responses):
        yield replace(request, responses=1, first=request.first + number)


class Regulars:
    """Which engine serves which episode: at its first turn the one that owes the fewest responses,
    from then on the same one, whose prefix cache has what was said."""

    def __init__(self, engines: int) -> None:
        self._owed = [0] * engines
        self._engine_of: dict[int, int] = {}

    @contextmanager
    def served(self, episode: int, request: Request) -> Iterator[int]:
        """Within: an engine owes the answers to a request."""
        engine = self._engine_of.setdefault(episode, _least_busy(self._owed))
        responses = _owed_for(request)
        self._owed[engine] += responses
        try:
            yield engine
        finally:
            self._owed[engine] -= responses
