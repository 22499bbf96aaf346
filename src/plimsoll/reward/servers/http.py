"""A reward from one or more equivalent servers over HTTP.

A request goes to the least busy server. A server that just failed is used only if all others
failed, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll.config.json_text import parse_json
from plimsoll.config.rl import HttpReward
from plimsoll.config.secrets import mask_setting
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import await_fault_point
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
"""Seconds for which a server that failed gets no requests, if there is another server."""
_BUSY = (408, 425, 429)
"""Status codes below 500 after which another try may succeed; RFC 9110, RFC 6585."""

_MOST_BYTES = 64 * 2**20
"""The longest answer that is read; one with 10,000 rewards has less than 1 MiB."""
_SHORTEST_KEY = 8
"""Characters of a key that is secret; a shorter one may be part of any answer."""


@dataclass
class _Server:
    url: str
    requests: int = 0
    """Requests under way."""
    rests_until: float = 0.0


@dataclass(frozen=True)
class Replicas:
    """Equivalent servers: each of them can answer any request.

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
        """Return replicas at these addresses."""
        return cls(client, tuple(map(_Server, urls)), limit, headers or {})

    async def post(self, body: Mapping[str, Any]) -> object | Failed | Broken:
        """Send a JSON request to one server, and return its answer as a JSON value.

        Returns Failed if the server does not answer in time, or has a status that may pass (5xx,
        408, 425, 429). Returns Broken for another error status, or an answer that is no JSON.
        """
        content = json.dumps(body, default=str).encode()
        async with self._least_busy() as server:
            try:
                async with asyncio.timeout(self.limit.seconds):
                    await await_fault_point("reward.call")
                    code, reply = await self._exchange(server.url, content)
            except TimeoutError:
                return self._rest(server, self.limit.failure(f": {server.url}"))
            except (httpx.RequestError, OSError) as error:
                what = str(error) or type(error).__name__
                said = f": {server.url} cannot be reached: {what}"
                return self._rest(server, Failed(said, unanswered=True))
            if reply is None:
                return Broken(f": {server.url} answered more than {_MOST_BYTES >> 20} MiB")
            text = short_repr(reply.decode(errors="replace"))
            answered = f": {server.url} answered {code}: {text}"
            if code >= 500 or code in _BUSY:
                return self._rest(server, Failed(answered))
            if not httpx.codes.is_success(code):
                return Broken(answered)
            try:
                answer: object = parse_json(reply)
                return answer
            except ValueError:
                return Broken(f": {server.url} answered no JSON: {text}")

    async def _exchange(self, url: str, content: bytes) -> tuple[int, bytes | None]:
        """Return an answer's status and content, None if that is too long.

        A server may repeat the key that it was sent; the content has `***` in its place.
        """
        headers, reply = {"Content-Type": "application/json", **self.headers}, bytearray()
        async with self.client.stream("POST", url, content=content, headers=headers) as response:
            async for part in response.aiter_bytes():
                reply += part
                if len(reply) > _MOST_BYTES:
                    return response.status_code, None
        for value in self.headers.values():
            key = value.rpartition(" ")[2].encode()
            if len(key) >= _SHORTEST_KEY:
                reply = reply.replace(key, b"***")
        return response.status_code, bytes(reply)

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


def bearer(variable: str | None) -> dict[str, str]:
    """Return the headers with the key in an environment variable; none if no variable is named.

    Raises ConfigError if the variable is not set.
    """
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise ConfigError(
            f"the environment variable {mask_setting(variable)} should hold the key of the "
            f"servers, and is not set. Set it, or leave api_key out."
        )
    return {"Authorization": f"Bearer {key}"}


Read = Callable[[object, int], list[Outcome]]
"""Takes a server's answer and the number of trajectories, and returns their outcomes."""


@dataclass(frozen=True)
class Servers:
    """Asks one of several servers for the rewards of a batch: a `RewardCall`."""

    replicas: Replicas
    ask: AskServer
    read: Read = outcomes

    @classmethod
    def of(cls, http: HttpReward, client: httpx.AsyncClient, limit: TimeLimit) -> Servers:
        """Return the caller of a config's servers. `limit` says how long one request may take."""
        replicas = Replicas.of(client, http.urls, limit, bearer(http.api_key))
        if http.format == "plimsoll":
            return cls(replicas, plimsoll_request)
        if http.format == "vllm":
            render = http.tokenizer and _renderer(http.tokenizer, http.chat_template)
            return cls(replicas, vllm_request(render or _actors_tokens), vllm_outcomes)
        return cls(replicas, openrlhf_request(texts_by(http.tokenizer)))

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return one outcome per trajectory, from the answer of one server."""
        reply = await self.replicas.post(self.ask(trajectories))
        if isinstance(reply, Failed | Broken):
            return [reply] * len(trajectories)
        return self.read(reply, len(trajectories))


def _actors_tokens(trajectory: Trajectory) -> Sequence[int]:
    return [*trajectory.prompt.tokens, *trajectory.response_tokens]


def _renderer(model: str, chat_template: str | None) -> Tokens:
    """Return a function from a trajectory to its tokens by this model's tokenizer and template."""
    # Heavy, and only where asked for.
    from plimsoll.data.template import make_template
    from plimsoll.model.load import load_tokenizer
    from plimsoll.reward.conversation import conversation_tokens

    template = make_template(load_tokenizer(model), chat_template, None)
    return lambda trajectory: conversation_tokens(trajectory, template)[0].tolist()
