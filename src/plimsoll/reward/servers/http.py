"""A reward from servers over HTTP, and the choice among servers that are each as good as any other.

A request goes to the least busy server that answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll.config.reward import HttpReward
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Broken, Failed, Outcome, TimeLimit, short_repr
from plimsoll.reward.servers.formats import (
    AskServer,
    Tokens,
    openrlhf_request,
    outcomes,
    plimsoll_request,
    texts_by,
    vllm_outcomes,
    vllm_request,
)

_REST_SECONDS = 5.0
"""The time for which a server that did not answer gets no requests, if there is another."""
_BUSY = (408, 425, 429)
"""Status codes below 500 after which another try may succeed; RFC 9110, RFC 6585."""


@dataclass
class _Server:
    url: str
    requests: int = 0
    """Requests under way."""
    rests_until: float = 0.0


@dataclass(frozen=True)
class Replicas:
    """Servers of which each can answer any request.

    Attributes:
        client: Sends the requests.
        servers: The servers.
        limit: How long one request may take.
        headers: Headers of each request.
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
        """Return the servers of these addresses."""
        return cls(client, tuple(map(_Server, urls)), limit, headers or {})

    async def post(self, body: Mapping[str, Any]) -> object | Failed | Broken:
        """Return what a server answers, as JSON.

        Returns Failed if none answers, or cannot now; Broken if the answer is something else, or
        says that there will never be one.
        """
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
                return self._rest(server, self.limit.failure(f": {server.url}"))
            except httpx.RequestError as error:
                what = str(error) or type(error).__name__
                said = f": {server.url} cannot be reached: {what}"
                return self._rest(server, Failed(said, unanswered=True))
            text = short_repr(response.text)
            answered = f": {server.url} answered {response.status_code}: {text}"
            if response.status_code >= 500 or response.status_code in _BUSY:
                return self._rest(server, Failed(answered))
            if not response.is_success:
                return Broken(answered)
            try:
                answer: object = response.json()
                return answer
            except ValueError:
                return Broken(f": {server.url} answered no JSON: {text}")

    @asynccontextmanager
    async def _least_busy(self) -> AsyncIterator[_Server]:
        now = time.monotonic()
        server = min(self.servers, key=lambda s: (s.rests_until > now, s.requests))
        server.requests += 1
        try:
            yield server
        finally:
            server.requests -= 1

    def _rest(self, server: _Server, failed: Failed) -> Failed:
        """Leave the server alone for a while, and return its failure."""
        server.rests_until = time.monotonic() + _REST_SECONDS
        return failed


Read = Callable[[object, int], list[Outcome]]
"""Takes a server's answer and the number of trajectories, and returns their outcomes."""


@dataclass(frozen=True)
class Servers:
    """Asks one of several servers about a batch: a `Call`."""

    replicas: Replicas
    ask: AskServer
    read: Read = outcomes

    @classmethod
    def of(cls, http: HttpReward, client: httpx.AsyncClient, limit: TimeLimit) -> Servers:
        """Return the servers of a config. `limit` says how long one request may take."""
        replicas = Replicas.of(client, http.urls, limit)
        if http.format == "plimsoll":
            return cls(replicas, plimsoll_request)
        if http.format == "vllm":
            render = http.tokenizer and _renderer(http.tokenizer, http.chat_template)
            return cls(replicas, vllm_request(render or _actors_tokens), vllm_outcomes)
        return cls(replicas, openrlhf_request(texts_by(http.tokenizer)))

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return the outcomes that a server gives."""
        reply = await self.replicas.post(self.ask(trajectories))
        if isinstance(reply, Failed | Broken):
            return [reply] * len(trajectories)
        return self.read(reply, len(trajectories))


def _actors_tokens(trajectory: Trajectory) -> Sequence[int]:
    return [*trajectory.prompt.tokens, *trajectory.response_tokens]


def _renderer(model: str, chat_template: str | None) -> Tokens:
    """Return what renders prompt and response by the model's own tokenizer and template."""
    # Heavy, and only where asked for.
    from plimsoll.data.template import make_template
    from plimsoll.model.load import load_tokenizer
    from plimsoll.reward.conversation import conversation_tokens

    template = make_template(load_tokenizer(model), chat_template, None)
    return lambda trajectory: conversation_tokens(trajectory, template)[0].tolist()
