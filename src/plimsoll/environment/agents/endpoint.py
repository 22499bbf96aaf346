"""The policy of a run to agents, by HTTP on this machine: as the OpenAI API, and tokens in, tokens
out.

    POST /v1/chat/completions   messages, tools, max_tokens, stop, n, stream, logprobs
    POST /v1/generate           prompt_token_ids, max_tokens, stop
    GET  /v1/models

Each episode has a key of its own, the bearer token of its calls. A completion has the tokens, too:
`prompt_token_ids` and each choice's `token_ids`. How turns are sampled is the run's: another
temperature in a call is told once and not followed, for what is learned from must be what the run's
settings sampled.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plimsoll.config.rollout import SamplingConfig, ServeConfig
from plimsoll.environment.agents.messages import (
    asked_most,
    asked_number,
    asked_stop,
    asked_tools,
    read_messages,
    written_reply,
)
from plimsoll.environment.agents.session import CallRefused, Said, Session
from plimsoll.environment.schemas import shown
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Trajectory
from plimsoll.run.output import tell

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "policy"
"""What the policy is called; other names are taken, too."""
_NEEDED = ("starlette", "uvicorn")
_OWN = ("temperature", "top_p", "top_k", "min_p")
"""Settings of sampling that are the run's."""
_UNKNOWN_KEY = "This key is of no episode that is being played."


class Endpoint:
    """One for a run. To be opened and closed in the event loop that episodes are played in."""

    def __init__(self, config: ServeConfig) -> None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"An agent needs {' and '.join(missing)}, which is not installed. Install "
                f"plimsoll-rl with its extra `serve`, `cpu` or `gpu`."
            )
        self._listener = _bound(config)
        host, port = self._listener.getsockname()[:2]
        self.base_url = f"http://{host}:{port}/v1"
        self._sessions: dict[str, Session] = {}
        self._told: set[str] = set()

    async def open(self) -> None:
        """Answer from now on."""
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Answer no more."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self._serving])  # it may have been cancelled with what it served
        self._listener.close()

    @contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """Within: an episode's calls are answered, by the key that this gives."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        session = self._session(request)
        if session is None:
            return _refused(_UNKNOWN_KEY, 401)
        try:
            asked = await _body(request)
            self._tell_differing(asked, session.policy.sampling)
            messages, tools = read_messages(asked.get("messages")), asked_tools(asked)
            most, stop = asked_most(asked), asked_stop(asked)
            count = asked_number(asked, "n") or 1
            said = [await session.chat(messages, tools, most, stop) for _ in range(count)]
        except (CallRefused, DataError) as error:
            return _refused(str(error), 400)
        found = _completion(session, asked, said)
        if asked.get("stream"):
            return StreamingResponse(_events(found), media_type="text/event-stream")
        return _json(found)

    async def _generate(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _refused(_UNKNOWN_KEY, 401)
        try:
            asked = await _body(request)
            self._tell_differing(asked, session.policy.sampling)
            tokens = asked.get("prompt_token_ids")
            if not isinstance(tokens, list) or not tokens or not all(map(_is_token, tokens)):
                raise DataError(f"prompt_token_ids is {shown(tokens)}, not a list of tokens.")
            answer = await session.sample(tokens, asked_most(asked), asked_stop(asked))
        except (CallRefused, DataError) as error:
            return _refused(str(error), 400)
        return _json(
            {
                "token_ids": answer.response_tokens.tolist(),
                "logprobs": answer.sampler_logprobs.tolist(),
                "weight_versions": answer.weight_versions.tolist(),
                "text": answer.response_text,
                "finish_reason": answer.finish_reason,
            }
        )

    def _session(self, request: Request) -> Session | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._sessions.get(key) if scheme.lower() == "bearer" else None

    def _tell_differing(self, asked: Mapping[str, Any], sampling: SamplingConfig) -> None:
        for name in _OWN:
            own = getattr(sampling, name)
            if asked.get(name, own) not in (own, None) and name not in self._told:
                self._told.add(name)
                tell(
                    f"an agent asked for a {name} of {asked[name]}: its turns are sampled with "
                    f"rollout.sampling.{name}, which is {own}"
                )


def _bound(config: ServeConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"rollout.serve: {config.host}:{config.port} cannot be served at: {error.strerror}. "
            f"Give another rollout.serve.port, or 0 for a free one."
        ) from error


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        found = await request.json()
    except ValueError as error:
        raise DataError(f"The request is not valid JSON: {error}.") from error
    if not isinstance(found, Mapping):
        raise DataError(f"The request is {shown(found)}, and a JSON object is needed.")
    return found


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _completion(session: Session, asked: Mapping[str, Any], said: list[Said]) -> dict[str, Any]:
    """As the OpenAI API has it, and with tokens."""
    logprobs = bool(asked.get("logprobs"))
    new = sum(len(one.answer.response_tokens) for one in said)
    prompt = len(said[0].asked)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.get("model") or MODEL,
        "choices": [_choice(session, one, i, logprobs) for i, one in enumerate(said)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        },
        "prompt_token_ids": said[0].asked.tolist(),
    }


def _choice(session: Session, said: Said, index: int, logprobs: bool) -> dict[str, Any]:
    calls, answer = said.reply.tool_calls, said.answer
    cut = answer.finish_reason == "length"
    return {
        "index": index,
        "message": written_reply(said.reply),
        "finish_reason": "length" if cut else "tool_calls" if calls else "stop",
        "logprobs": {"content": _logprobs(session, answer)} if logprobs else None,
        "token_ids": answer.response_tokens.tolist(),
    }


def _logprobs(session: Session, answer: Trajectory) -> list[dict[str, Any]]:
    speech = session.table.speech
    return [
        {"token": speech.text([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(
            answer.response_tokens.tolist(), answer.sampler_logprobs.tolist(), strict=True
        )
    ]


async def _events(completion: Mapping[str, Any]) -> AsyncIterator[str]:
    """The same as a stream: a turn is sampled whole, and comes at once."""
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": i, **call} for i, call in calls]
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            piece = {"index": choice["index"], "delta": part, "finish_reason": reason}
            yield f"data: {json.dumps({**head, 'choices': [piece]})}\n\n"
    yield "data: [DONE]\n\n"


def _json(content: object, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)


def _refused(said: str, status: int) -> Response:
    return _json({"error": {"message": said, "type": "invalid_request_error"}}, status)
