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

from plimsoll.reward.outcome import Broken, Failed, TimeLimit, shown

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
    """Servers of which each can answer any request.

    Attributes:
        client: what sends the requests.
        servers: the servers.
        limit: how long one request may take.
        headers: headers of each request.
    """

    client: httpx.AsyncClient
    servers: tuple[_Server, ...]
    limit: TimeLimit
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        client: httpx.AsyncClient,
        urls: Sequence[str],
        limit: TimeLimit,
        headers: Mapping[str, str] | None = None,
    ) -> Replicas:
        """Make them from their addresses."""
        return cls(client, tuple(map(_Server, urls)), limit, headers or {})

    async def post(self, body: Mapping[str, Any]) -> object | Failed | Broken:
        """What one of them answers, as JSON. Failed: none, or that it cannot answer now; Broken:
        something else, or that it will never answer this."""
        content = json.dumps(body, default=str).encode()
        async with self._least_busy() as server:
            try:
                async with asyncio.timeout(self.limit.seconds):
                    response = await self.client.post(
                        server.url,
                        content=content,
                        headers={"Content-Type": "application/json", **self.headers},
                    )
            except TimeoutError:
                return self._resting(server, self.limit.exceeded(f": {server.url}"))
            except httpx.RequestError as error:
                what = str(error) or type(error).__name__
                said = f": {server.url} cannot be reached: {what}"
                return self._resting(server, Failed(said, unanswered=True))
            answered = f": {server.url} answered {response.status_code}: {shown(response.text)}"
            if response.status_code >= 500 or response.status_code in _BUSY:
                return self._resting(server, Failed(answered))
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

    def _resting(self, server: _Server, failed: Failed) -> Failed:
        """Leave the server alone for a while, and return its failure."""
        server.rests_until = time.monotonic() + _REST_SECONDS
        return failed
