"""Plays episodes of a verifiers environment, many side by side, with a policy elsewhere.

    python player.py check|tasks|play

The first line on standard input says what to open: {taskset, environment, options}; the answer is
{ready: VERSION} or {refused: WHY}. `tasks` then writes {task, messages} for each task, `play`
consumes these lines until standard input is closed, which ends it:

    {episode, task}                          begin an episode
    {episode, turn, message, finish_reason}  the policy's answer to a turn
    {episode, turn, refused}                 there is none: the episode ends, and is scored
    {episode, close}                         give it up
    {ping}                                   answered at once

and produces:

    {episode, turn, asked}                   the policy is to speak; asked: as a chat completion is
    {episode, reward, figures}               it is over
    {episode, failed, lines}                 it cannot go on
    {pong}

It waits for the policy and for what the environment does; nothing but a line unblocks a turn.
verifiers asks for turns as it asks any endpoint of OpenAI's form: at a port of this machine that
the player itself serves. What is printed goes to standard error.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

import verifiers
import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError
from verifiers.v1.clients.client import SESSION_ID_HEADER

MODEL = "policy"
HARNESS = "plimsoll-chat"
"""The file plimsoll_chat.py beside this one."""
_LINES = 20
_LONGEST_LINE = 2**28

Say = Callable[[Mapping[str, Any]], None]


class Refused(Exception):
    """A setup that cannot be opened; its text says why."""


def configured(setup: Mapping[str, Any]) -> vf.EnvConfig:
    """The config of an environment. Where its options do not say otherwise, each agent talks in
    this process and its tools run on this machine: verifiers' own defaults are a shell for the
    policy, in a sandbox that costs money."""
    taskset, environment = setup["taskset"], setup["environment"]
    options: dict[str, Any] = dict(setup["options"])
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    kind = vf.env_config_type(taskset, environment)
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            options[name] = _agent(options.get(name) or {}, field.default, taskset)
    return vf.resolve_env_config({**options, "id": environment})


def _agent(given: Mapping[str, Any], default: vf.AgentConfig, taskset: str) -> dict[str, Any]:
    agent = dict(given)
    if "runtime" not in {*agent, *default.model_fields_set}:
        agent["runtime"] = {"type": "subprocess"}
    own = "harness" in {*agent, *default.model_fields_set}
    if not own and vf.default_harness_id(taskset) == "bash":
        agent["harness"] = {"id": HARNESS}
    return agent


def opened(setup: Mapping[str, Any]) -> vf.Env:
    """Raises Refused for what verifiers says against it, or what its package raises."""
    try:
        return vf.load_environment(configured(setup))
    except ValidationError as error:
        told = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise Refused("; ".join(told)) from error
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def tasks(env: vf.Env, limit: int | None, skip: int) -> Iterator[dict[str, Any]]:
    """The data of its tasks, each with the messages that a reader knows it by."""
    chosen = env.taskset.skip(skip)
    if limit is not None:
        chosen = chosen.take(limit)
    elif not chosen.bounded:
        raise Refused("it has tasks without end: say how many of them")
    for task in chosen:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {"task": data, "messages": _messages(task.data)}


def _messages(data: vf.TaskData) -> list[dict[str, str]]:
    text = data.prompt_text or data.name or data.description or f"task {data.idx}"
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": text}]


class Episode:
    """traces: of its agents, by their ids. failure: what is wrong with it, besides what verifiers
    says."""

    def __init__(self, number: int, say: Say) -> None:
        self.number, self._say = number, say
        self.traces: dict[str, vf.Trace] = {}
        self.asked: set[str] = set()
        self.failure = ""
        self._turns = itertools.count()
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    async def turn(self, trace: vf.Trace, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the policy answers."""
        self.asked.add(trace.id)
        turn = next(self._turns)
        waiting: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[turn] = waiting
        self._say({"episode": self.number, "turn": turn, "asked": asked})
        try:
            return await waiting
        finally:
            del self._answers[turn]

    def end(self) -> None:
        """Have nothing wait for the policy any more."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result({"refused": "The episode is over."})

    def answered(self, turn: int, answer: Mapping[str, Any]) -> None:
        """One that nobody waits for any more is dropped."""
        waiting = self._answers.get(turn)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def result(self, episode: vf.Episode) -> dict[str, Any]:
        """What is said of it once it is over: the mean of what its agents got that the policy
        played."""
        if not episode.ok:
            errors = [*episode.errors, *(one for t in episode.traces for one in t.errors)]
            if not errors:
                return {"failed": " ended without success, and without an error"}
            lines = (errors[-1].traceback or "").splitlines()[-_LINES:]
            said = f" raised {errors[-1].type}: {errors[-1].message}"
            return {"failed": said, "lines": "\n".join(lines)}
        played = [trace for trace in episode.traces if trace.id in self.asked]
        if not played:
            return {"failed": " was over before it asked the policy"}
        return {"reward": fmean(trace.reward for trace in played), "figures": _figures(played)}


def _figures(played: list[vf.Trace]) -> dict[str, float]:
    """Means of metrics, and of the parts of the reward where there are several."""
    found: dict[str, list[float]] = {}
    for trace in played:
        for name, value in trace.metrics.items():
            found.setdefault(name, []).append(float(value))
        given = {name: own for name, own in trace.rewards.items() if own is not None}
        for name, own in given.items() if len(given) > 1 else ():
            found.setdefault(f"reward_{name}", []).append(own.score)
    return {name: fmean(values) for name, values in found.items()}


class Player:
    """env: opened. say: writes a message."""

    def __init__(self, env: vf.Env, say: Say) -> None:
        self._env, self._say = env, say
        self._task_class = type(env.taskset).task_type()
        self._episodes: dict[int, Episode] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Play until there are no more lines."""
        async with AsyncExitStack() as stack:
            app = web.Application(client_max_size=_LONGEST_LINE)
            app.router.add_post("/v1/chat/completions", self._chat)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            client = vf.EvalClientConfig(
                base_url=f"http://127.0.0.1:{port}/v1", api_key_var="PLIMSOLL_NO_KEY"
            )
            self._context = vf.ModelContext(model=MODEL, client=client)
            await stack.enter_async_context(self._env.serving())
            self._say({"ready": verifiers.__version__})
            try:
                while line := await lines.readline():
                    self._hear(json.loads(line))
            finally:
                for task in [*self._playing.values()]:
                    task.cancel()
                await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "ping" in message:
            self._say({"pong": message["ping"]})
            return
        number = message["episode"]
        if "task" in message:
            episode = self._episodes[number] = Episode(number, self._say)
            self._playing[number] = asyncio.create_task(self._play(episode, message["task"]))
        elif "close" in message:
            playing = self._playing.get(number)
            if playing is not None:
                playing.cancel()
        elif number in self._episodes:
            self._episodes[number].answered(message["turn"], message)

    async def _play(self, episode: Episode, data: Mapping[str, Any]) -> None:
        try:
            read = self._task_class.data_type().model_validate(data)
            task = self._task_class(read, self._env.config.taskset.task)
            whole = await self._env.run_episode(
                task,
                self._context,
                on_trace=lambda trace: episode.traces.__setitem__(trace.id, trace),
            )
            found = episode.result(whole)
        except asyncio.CancelledError:
            if not episode.failure:  # nobody wants to hear of it any more
                raise
            found = {"failed": episode.failure}
        except Exception as error:  # noqa: BLE001  the run tells it
            found = {"failed": f" raised {type(error).__name__}: {error}"}
        finally:
            episode.end()
            self._episodes.pop(episode.number, None)
            self._playing.pop(episode.number, None)
        self._say({"episode": episode.number, **found})

    async def _chat(self, request: web.Request) -> web.Response:
        """A turn of the policy's, as verifiers asks for it."""
        trace_id = request.headers.get(SESSION_ID_HEADER, "")
        episode = next((e for e in self._episodes.values() if trace_id in e.traces), None)
        if episode is None:
            return _error("The episode is over.")
        trace, asked = episode.traces[trace_id], await request.json()
        if not trace.agent.trainable:
            name = trace.agent.name
            episode.failure = (
                f"'s agent {name!r} is not to be trained, and asks the policy. Give it a model of "
                f"its own: {name}.model and {name}.client.base_url among the options"
            )
            self._playing[episode.number].cancel()
            return _error(episode.failure)
        answer = await episode.turn(trace, asked)
        if "refused" in answer:
            # A rollout that is stopped is scored as it is, where one that fails is not.
            trace.stop("refused")
            return _error(answer["refused"])
        return _completion(answer, stream=bool(asked.get("stream")))


def _error(said: str) -> web.Response:
    error = {"message": said, "type": "invalid_request_error"}
    return web.json_response({"error": error}, status=400)


def _completion(answer: Mapping[str, Any], *, stream: bool) -> web.Response:
    """As the OpenAI API has it. A stream is sent whole: the turn was sampled whole."""
    message, reason = answer["message"], answer["finish_reason"]
    head = {"id": f"turn-{answer['turn']}", "created": 0, "model": MODEL}
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice]})
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    head["object"] = "chat.completion.chunk"
    pieces = [
        {**head, "choices": [{"index": 0, "delta": part, "finish_reason": why}]}
        for part, why in ((delta, None), ({}, reason))
    ]
    events = [*(json.dumps(piece) for piece in pieces), "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    return web.Response(text=text, content_type="text/event-stream")


async def _played(env: vf.Env, say: Say) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    lines = asyncio.StreamReader(limit=_LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Player(env, say).serve(lines)


def main(what: str) -> None:
    """Do what is asked; see above."""
    written = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        written.write(json.dumps(message) + "\n")
        written.flush()

    with os.fdopen(os.dup(0), "rb", buffering=0) as first:  # further lines are the event loop's
        setup = json.loads(first.readline())
    try:
        env = opened(setup)
        if what == "play":
            asyncio.run(_played(env, say))
            return
        say({"ready": verifiers.__version__})
        for task in tasks(env, setup["limit"], setup["skip"]) if what == "tasks" else ():
            say(task)
    except Refused as error:
        say({"refused": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
