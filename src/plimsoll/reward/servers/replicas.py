"""Servers that are each as good as any other: the least busy one that answers is asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll.reward.outcome import Broken, Failed, shown

_REST_SECONDS = 5.0
"""How long a server that did not answer is left alone, where there is another."""
_BUSY = (408, 425, 429)
"""Answers below 500 after which another try may do; RFC 9110, RFC 6585."""


@dataclass
class _Server:
    url: str
    asked: int = 0
    rests_until: float = 0.0


@dataclass(frozen=True)
class Replicas:
    """places: how many requests are on their way at the same time, to all of them."""

    client: httpx.AsyncClient
    servers: tuple[_Server, ...]
    time_limit: float
    places: asyncio.Semaphore
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        client: httpx.AsyncClient,
        urls: Sequence[str],
        time_limit: float,
        at_once: int,
        headers: Mapping[str, str] | None = None,
    ) -> Replicas:
        """at_once: requests to one server."""
        servers = tuple(map(_Server, urls))
        places = asyncio.Semaphore(at_once * len(servers))
        return cls(client, servers, time_limit, places, headers or {})

    async def post(self, body: Mapping[str, Any]) -> object | Failed | Broken:
        """What one of them answers, as JSON. Failed: none, or that it cannot answer now; Broken:
        something else, or that it will never answer this."""
        content = json.dumps(body, default=str).encode()
        async with self.places, self._least_busy() as server:
            try:
                async with asyncio.timeout(self.time_limit):
                    response = await self.client.post(
                        server.url,
                        content=content,
                        headers={"Content-Type": "application/json", **self.headers},
                    )
            except TimeoutError:
                said = f" took longer than its time_limit of {self.time_limit:g} s"
                return self._resting(server, f": {server.url}{said}")
            except httpx.RequestError as error:
                what = str(error) or type(error).__name__
                return self._resting(server, f": {server.url} cannot be reached: {what}")
            answered = f": {server.url} answered {response.status_code}: {shown(response.text)}"
            if response.status_code >= 500 or response.status_code in _BUSY:
                return self._resting(server, answered)
            if not response.is_success:
                return Broken(answered)
            try:
                answer: object = response.json()
                return answer
            except ValueError:
                return Broken(f": {server.url} answered no JSON: {shown(response.text)}")

    @asynccontextmanager
    async def _least_busy(self) -> AsyncIterator[_Server]:
        now = time.monotonic()
        server = min(self.servers, key=lambda one: (one.rests_until > now, one.asked))
        server.asked += 1
        try:
            yield server
        finally:
            server.asked -= 1

    def _resting(self, server: _Server, said: str) -> Failed:
        server.rests_until = time.monotonic() + _REST_SECONDS
        return Failed(said)
