"""Rewards that others compute: servers over HTTP, and language models that judge responses.

A request goes to the least busy of equivalent servers. A server that just failed is used only if
all others failed, too.

A judge is behind an OpenAI-compatible endpoint. POST URL/chat/completions:
https://platform.openai.com/docs/api-reference/chat; vLLM, SGLang and others serve the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from plimsoll.config.json_text import parse_json
from plimsoll.config.reward import HttpReward, JudgeReward
from plimsoll.config.secrets import mask_setting
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import await_fault_point
from plimsoll.process.patterns import PatternTooSlow, last_group
from plimsoll.process.threads import in_thread
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Failed, Outcome, RewardCall, TimeLimit, short_repr
from plimsoll.reward.server_forms import (
    AskServer,
    Tokens,
    conversation_tokens,
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


class Replicas:
    """Equivalent servers: each of them can answer any request.

    Args:
        client: Sends the requests.
        urls: The addresses of the servers.
        limit: How long one request may take.
        key: The key of the servers, if they want one.
    """

    def __init__(
        self, client: httpx.AsyncClient, urls: Sequence[str], limit: TimeLimit, key: str = ""
    ) -> None:
        self._client, self._limit, self._key = client, limit, key
        self._servers = tuple(map(_Server, urls))

    async def post(self, body: Mapping[str, Any]) -> object | Failed:
        """Send a JSON request to one server, and return its answer as a JSON value.

        Returns Failed if the server does not answer in time, or has an error status. The failure
        may pass if the status is 5xx, 408, 425 or 429. It is final for another error status, and
        for an answer that is no JSON.
        """
        content = json.dumps(body, default=str).encode()
        async with self._least_busy() as server:
            try:
                async with asyncio.timeout(self._limit.seconds):
                    await await_fault_point("reward.call")
                    code, reply = await self._exchange(server.url, content)
            except TimeoutError:
                return self._rest(server, self._limit.failure(f": {server.url}"))
            except (httpx.RequestError, OSError) as error:
                what = str(error) or type(error).__name__
                said = f": {server.url} cannot be reached: {what}"
                return self._rest(server, Failed(said, unanswered=True))
            if reply is None:
                said = f": {server.url} answered more than {_MOST_BYTES >> 20} MiB"
                return Failed(said, final=True)
            text = short_repr(reply.decode(errors="replace"))
            answered = f": {server.url} answered {code}: {text}"
            if code >= 500 or code in _BUSY:
                return self._rest(server, Failed(answered))
            if not httpx.codes.is_success(code):
                return Failed(answered, final=True)
            try:
                answer: object = parse_json(reply)
                return answer
            except ValueError:
                return Failed(f": {server.url} answered no JSON: {text}", final=True)

    async def _exchange(self, url: str, content: bytes) -> tuple[int, bytes | None]:
        """Return an answer's status and content, None if that is too long.

        A server may repeat the key that it was sent; the content has `***` in its place.
        """
        headers, reply = {"Content-Type": "application/json"}, bytearray()
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        async with self._client.stream("POST", url, content=content, headers=headers) as response:
            async for part in response.aiter_bytes():
                reply += part
                if len(reply) > _MOST_BYTES:
                    return response.status_code, None
        if len(self._key) >= _SHORTEST_KEY:
            reply = reply.replace(self._key.encode(), b"***")
        return response.status_code, bytes(reply)

    @asynccontextmanager
    async def _least_busy(self) -> AsyncIterator[_Server]:
        now = time.monotonic()
        server = min(self._servers, key=lambda s: (s.rests_until > now, s.requests))
        server.requests += 1
        try:
            yield server
        finally:
            server.requests -= 1

    def _rest(self, server: _Server, failed: Failed) -> Failed:
        """Leave the server alone for a while, and return its failure."""
        server.rests_until = time.monotonic() + _REST_SECONDS
        return failed


def read_key(variable: str | None, whose: str) -> str:
    """Return the key in an environment variable; "" if no variable is named.

    Raises ConfigError, with the key's owner, if the variable is not set.
    """
    if variable is None:
        return ""
    if not (key := os.environ.get(variable)):
        raise ConfigError(
            f"the environment variable {mask_setting(variable)} should hold the key of {whose}, "
            f"and is not set. Set it, or leave api_key out."
        )
    return key


def call_servers(http: HttpReward, client: httpx.AsyncClient, limit: TimeLimit) -> RewardCall:
    """Return the try that asks one of a config's servers for the rewards of a batch.

    `limit` says how long one request may take. Raises ConfigError if the environment variable of
    the servers' key is not set.
    """
    replicas = Replicas(client, http.urls, limit, read_key(http.api_key, "the servers"))
    read = vllm_outcomes if http.format == "vllm" else outcomes
    ask: AskServer = plimsoll_request
    if http.format == "openrlhf":
        ask = openrlhf_request(texts_by(http.tokenizer))
    elif http.format == "vllm":
        render = http.tokenizer and _renderer(http.tokenizer, http.chat_template)
        ask = vllm_request(render or _actors_tokens)

    async def call(trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        reply = await replicas.post(ask(trajectories))
        if isinstance(reply, Failed):
            return [reply] * len(trajectories)
        return read(reply, len(trajectories))

    return call


def _actors_tokens(trajectory: Trajectory) -> Sequence[int]:
    return [*trajectory.prompt.tokens, *trajectory.response_tokens]


def _renderer(model: str, chat_template: str | None) -> Tokens:
    """Return a function from a trajectory to its tokens by this model's tokenizer and template."""
    # Heavy, and only where asked for.
    from plimsoll.data.template import make_template
    from plimsoll.model.load import load_tokenizer

    template = make_template(load_tokenizer(model), chat_template, None)
    return lambda trajectory: conversation_tokens(trajectory, template)[0].tolist()


class Judge:
    """Asks for the score of one response at a time: a `RewardCall`."""

    def __init__(self, settings: JudgeReward, client: httpx.AsyncClient, limit: TimeLimit) -> None:
        """Make the judge of a config; `limit` says how long one request may take.

        Raises ConfigError if the environment variable of its key is not set.
        """
        url = f"{settings.url.rstrip('/')}/chat/completions"
        key = read_key(settings.api_key, f"the judge at {settings.url}")
        self._settings, self._endpoint = settings, Replicas(client, [url], limit, key)

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return one outcome per trajectory; trajectories are asked about one after another."""
        return [await self._judge(trajectory) for trajectory in trajectories]

    async def _judge(self, trajectory: Trajectory) -> Outcome:
        try:
            request = self._request(trajectory)
        except (KeyError, IndexError) as error:
            said = f": the judge's prompt names {error}, and the row has no such column"
            return Failed(said, kind=ConfigError, final=True)
        reply = await self._endpoint.post(request)
        if isinstance(reply, Failed):
            return reply
        text = _text(reply)
        if text is None:
            said = f" answered {short_repr(reply)}, and a chat completion is needed"
            return Failed(said, final=True)
        return await in_thread(partial(self._score, text))

    def _request(self, trajectory: Trajectory) -> dict[str, Any]:
        settings, prompt = self._settings, trajectory.prompt
        texts = {"prompt": prompt.text, "response": trajectory.response_text}
        names = {"source": prompt.source, "reference": prompt.reference or "", **prompt.columns}
        content = settings.prompt.format_map(names | texts)
        system = [] if settings.system is None else [_message("system", settings.system)]
        return {
            "model": settings.model,
            "messages": [*system, _message("user", content)],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }

    def _score(self, text: str) -> Outcome:
        """Return the last score in a judge's answer, scaled from `low`..`high` to 0..1.

        Returns Failed, so that the judge is asked again, if there is no score within the range.
        """
        settings = self._settings
        try:
            found = last_group(settings.pattern, text)
        except PatternTooSlow as error:
            return Failed(f": {error}")
        if found is None:
            return Failed(f" found no score by its pattern in {short_repr(text)}")
        try:
            score = float(found)
        except ValueError:
            return Failed(f" found no number but {found!r} in {short_repr(text)}")
        if not settings.low <= score <= settings.high:
            between = f"{settings.low:g} to {settings.high:g}"
            return Failed(f" found a score of {score:g}, outside {between}, in {short_repr(text)}")
        return (score - settings.low) / (settings.high - settings.low)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(reply: object) -> str | None:
    """Return the text of a chat completion; None if the reply has another form."""
    try:
        content = reply["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None
