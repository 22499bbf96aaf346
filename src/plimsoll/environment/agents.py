"""Play episodes with agents: code that drives the episode and asks the policy for each turn.

An agent is a function `play(row, base_url, api_key)`, plain or `async`. It calls the policy at the
endpoint there by HTTP, with messages (OpenAI's API) or with tokens:

    POST /v1/chat/completions   messages, tools, max_tokens, stop, n, stream, logprobs
    POST /v1/generate           prompt_token_ids, max_tokens, stop
    GET  /v1/models

Each episode has its own key, the bearer token of its calls. A completion also has the tokens:
`prompt_token_ids` and each choice's `token_ids`. Turns are always sampled with the run's settings,
because the run learns from them. A call that asks for another temperature is reported once, and the
temperature ignored. A call beyond the episode's limits is refused with the error code `refused`.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from plimsoll.config.json_text import parse_json
from plimsoll.config.rollout import SamplingConfig, ServeConfig
from plimsoll.environment.episode import (
    CallRefused,
    Episode,
    EpisodeMessage,
    EpisodePolicy,
    EpisodeRules,
)
from plimsoll.environment.local import call_own_code
from plimsoll.environment.messages import (
    read_count,
    read_max_tokens,
    read_messages,
    read_stop,
    read_tools,
    reply_to_wire,
)
from plimsoll.environment.opening import EpisodeAgent
from plimsoll.environment.protocol import EnvironmentFailed, EpisodeReward, read_reward
from plimsoll.errors import DataError
from plimsoll.machine.guard import (
    WRONG_HOST,
    TooLong,
    bind_socket,
    is_addressed,
    read_body,
    require_server,
    sent_token,
    url_of,
)
from plimsoll.records import Prompt, Trajectory, Transcript
from plimsoll.reward.outcome import Failed, short_repr
from plimsoll.run.numbers import finite_json, strict_json
from plimsoll.run.output import tell

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


MODEL = "policy"
"""The policy's name in `GET /v1/models`; calls may use any other name."""
REFUSED = "refused"
"""The code of the error for a call beyond the limits of an episode."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Sampling settings that a call cannot change."""


class Endpoint:
    """The HTTP server of a run. Open and close it in the event loop that plays episodes."""

    def __init__(self, config: ServeConfig) -> None:
        require_server(" Agents need it.")
        self._host = config.host
        self._listener = bind_socket(config.host, config.port, "rollout.serve.port")
        self.base_url = f"{url_of(self._listener.getsockname()[0], self._listener)}/v1"
        self._episodes: dict[str, Episode] = {}
        self._noted: set[str] = set()

    async def open(self) -> None:
        """Begin to answer."""
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", partial(self._answer, _chat), methods=["POST"]),
            Route("/v1/generate", partial(self._answer, _generate), methods=["POST"]),
            Route("/v1/models", _list_models, methods=["GET"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop answering."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self._serving])  # it may have been cancelled with what it served
        self._listener.close()

    @contextmanager
    def serving(self, episode: Episode) -> Iterator[str]:
        """Yield the key of an episode; calls with this key are answered inside the block."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        self._episodes[key] = episode
        try:
            yield key
        finally:
            del self._episodes[key]

    async def _answer(self, answer: _Answering, request: Request) -> Response:
        """Return the response to a request: what `answer` returns, or an error response."""
        if not is_addressed(request.headers, self._host):
            return _error(WRONG_HOST, 421)
        episode = self._episodes.get(sent_token(request.headers))
        if episode is None:
            return _error("This key is of no episode that is being played.", 401)
        try:
            body = await _read_body(request)
            self._note_differences(body, episode.policy.sampling)
            return await answer(episode, body)
        except CallRefused as error:
            return _error(str(error), 400, REFUSED)
        except DataError as error:
            return _error(str(error), 400)

    def _note_differences(self, body: Mapping[str, Any], sampling: SamplingConfig) -> None:
        for name in _SAMPLING:
            setting = getattr(sampling, name)
            if body.get(name, setting) not in (setting, None) and name not in self._noted:
                self._noted.add(name)
                tell(
                    f"an agent asked for a {name} of {body[name]}: its turns are sampled with "
                    f"rollout.sampling.{name}, which is {setting}"
                )


_Answering = Callable[[Episode, Mapping[str, Any]], Awaitable["Response"]]
"""A function that takes an episode and a request's body, and returns the response."""


async def _list_models(request: Request) -> Response:
    return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _chat(episode: Episode, body: Mapping[str, Any]) -> Response:
    from starlette.responses import StreamingResponse

    messages, tools = read_messages(body.get("messages")), read_tools(body)
    max_tokens, stop = read_max_tokens(body), read_stop(body)
    count = read_count(body, "n") or 1
    turns = [await episode.chat(messages, tools, max_tokens, stop) for _ in range(count)]
    completion = _completion(episode, body, turns)
    if body.get("stream"):
        return StreamingResponse(_events(completion), media_type="text/event-stream")
    return _json(completion)


async def _generate(episode: Episode, body: Mapping[str, Any]) -> Response:
    tokens = body.get("prompt_token_ids")
    valid = isinstance(tokens, list) and all(type(t) is int and 0 <= t < 2**31 for t in tokens)
    if not valid or not tokens:
        raise DataError(f"prompt_token_ids is {short_repr(tokens)}, not a list of tokens.")
    sample = await episode.sample(tokens, read_max_tokens(body), read_stop(body))
    return _json(
        {
            "token_ids": sample.response_tokens.tolist(),
            "logprobs": sample.sampler_logprobs.tolist(),
            "weight_versions": sample.weight_versions.tolist(),
            "text": sample.response_text,
            "finish_reason": sample.finish_reason,
        }
    )


async def _read_body(request: Request) -> Mapping[str, Any]:
    try:
        body = parse_json(await read_body(request.stream()))
    except TooLong as error:
        raise DataError(f"{error}.") from error
    except ValueError as error:
        raise DataError(f"The request is not valid JSON: {error}.") from error
    if not isinstance(body, Mapping):
        raise DataError(f"The request is {short_repr(body)}, and a JSON object is needed.")
    return body


def _completion(
    episode: Episode, body: Mapping[str, Any], turns: list[EpisodeMessage]
) -> dict[str, Any]:
    """Return the response body of a chat completion (OpenAI's format), with the token ids."""
    new_tokens = sum(len(turn.sample.response_tokens) for turn in turns)
    prompt = turns[0].prompt
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [
            _choice(episode, turn, index, bool(body.get("logprobs")))
            for index, turn in enumerate(turns)
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": new_tokens,
            "total_tokens": len(prompt) + new_tokens,
        },
        "prompt_token_ids": prompt.tolist(),
    }


def _choice(episode: Episode, turn: EpisodeMessage, index: int, logprobs: bool) -> dict[str, Any]:
    calls, sample = turn.reply.tool_calls, turn.sample
    cut = sample.finish_reason == "length"
    return {
        "index": index,
        "message": reply_to_wire(turn.reply),
        "finish_reason": "length" if cut else "tool_calls" if calls else "stop",
        "logprobs": {"content": _logprobs(episode, sample)} if logprobs else None,
        "token_ids": sample.response_tokens.tolist(),
    }


def _logprobs(episode: Episode, sample: Trajectory) -> list[dict[str, Any]]:
    codec = episode.rules.codec
    return [
        {"token": codec.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(
            sample.response_tokens.tolist(), sample.sampler_logprobs.tolist(), strict=True
        )
    ]


async def _events(completion: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield the completion as server-sent events; each turn comes in one piece."""
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": i, **call} for i, call in calls]
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            chunk = {"index": choice["index"], "delta": part, "finish_reason": reason}
            yield f"data: {strict_json({**head, 'choices': [chunk]})}\n\n"
    yield "data: [DONE]\n\n"


def _json(content: object, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(finite_json(content), status)


def _error(why: str, status: int, code: str | None = None) -> Response:
    error = {"message": why, "type": "invalid_request_error", "code": code}
    return _json({"error": error}, status)


@dataclass(frozen=True)
class AgentResult:
    """A reward with figures; an agent may return this instead of the reward alone."""

    reward: EpisodeReward
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the episode, by name."""


async def _ask_agent(
    function: Callable[..., Any], endpoint: Endpoint, episode: Episode, row: Mapping[str, Any]
) -> AgentResult:
    """Have an agent's function play an episode; return its checked reward and its figures.

    Raises EnvironmentFailed if the agent raises, or if its result is not a reward.
    """
    with endpoint.serving(episode) as key:
        address = {"base_url": endpoint.base_url, "api_key": key}
        call = partial(function, row, **address, **episode.rules.config.options)
        given = await call_own_code(call, inspect.iscoroutinefunction(function))
    result = given if isinstance(given, AgentResult) else AgentResult(given)
    reward = read_reward(result.reward, function.__name__)
    if isinstance(reward, Failed):
        raise EnvironmentFailed(reward)
    return replace(result, reward=reward)


async def play_agent(
    agent: EpisodeAgent,
    endpoint: Endpoint,
    rules: EpisodeRules,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: EpisodePolicy,
) -> Trajectory:
    """Have the agent play an episode by calls of the endpoint; return the trajectory.

    An episode that ran out of turns, room or time may have no reward from the agent.
    Raises EnvironmentFailed if the agent fails, or asks for no turn.
    """
    episode, result = Episode(rules, prompt, policy), AgentResult(None)
    try:
        async with asyncio.timeout(rules.config.episode_seconds):
            result = await _ask_agent(agent.play, endpoint, episode, episode.row(group_seed))
    except TimeoutError:
        episode.reason = "time"
    except EnvironmentFailed:
        if episode.reason not in ("turns", "length"):  # an agent may not expect to be refused
            raise
    finally:
        episode.end()
    if not episode.branches:
        raise EnvironmentFailed(Failed(f" asked for no turn, and ended by: {episode.reason}"))
    trajectory = episode.trajectory(sample_index, result.reward, result.figures)
    turns = [turn for branch in episode.branches for turn in branch.turns]
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return replace(trajectory, transcript=Transcript(None, messages))
