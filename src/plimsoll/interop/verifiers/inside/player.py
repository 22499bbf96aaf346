"""Play episodes of a verifiers environment concurrently, with a policy behind an endpoint.

    python player.py check|tasks|play

The first line on standard input is JSON that says what to open: {taskset, environment, options},
for `play` with the token that requests to play send. The answer is a line {ready: VERSION, port} or
{refused: WHY}. `tasks` then writes a line {task, messages} for each task. `play` serves HTTP at
this port until standard input is closed:

    POST /play                 {task, base_url, api_key} -> {reward, figures} or {failed, lines}
    POST /v1/chat/completions  verifiers asks for a turn, as from any OpenAI-compatible endpoint,
                               with the random id of the episode's trace as its key; the request is
                               forwarded to the base_url of the turn's episode

An episode is cancelled when its request is closed. Printed text goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import verifiers
import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError
from verifiers.v1.clients.client import SESSION_ID_HEADER

sys.path.append(str(Path(__file__).parents[4]))  # Plimsoll, for this import alone
from plimsoll.machine.guard import WRONG_HOST, Guard, is_addressed

sys.path.pop()

MODEL = "policy"
HARNESS = "plimsoll-chat"
"""The harness in plimsoll_chat.py, beside this file."""
_REFUSED = "refused"
"""The error code of Plimsoll's endpoint for a turn beyond the limits of an episode."""
_TRACEBACK_LINES = 20
_MAX_BODY = 2**28

PlayerLine = Mapping[str, Any]


class Refused(Exception):
    """An environment cannot be opened; the text says why."""


def resolve_config(opening: PlayerLine) -> vf.EnvConfig:
    """Return the verifiers config of the environment to open.

    Unless the options say otherwise, each agent talks in this process and its tools run on this
    machine. verifiers' defaults would give the policy a shell, in a sandbox that costs money.
    """
    taskset, environment = opening["taskset"], opening["environment"]
    options: dict[str, Any] = dict(opening["options"])
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    kind = vf.env_config_type(taskset, environment)
    for name, key in kind.model_fields.items():
        if isinstance(key.default, vf.AgentConfig):
            options[name] = _with_defaults(options.get(name) or {}, key.default, taskset)
    return vf.resolve_env_config({**options, "id": environment})


def _with_defaults(given: PlayerLine, default: vf.AgentConfig, taskset: str) -> dict[str, Any]:
    settled, agent = {*given, *default.model_fields_set}, dict(given)
    if "runtime" not in settled:
        agent["runtime"] = {"type": "subprocess"}
    if "harness" not in settled and vf.default_harness_id(taskset) == "bash":
        agent["harness"] = {"id": HARNESS}
    return agent


def open_environment(opening: PlayerLine) -> vf.Env:
    """Return the opened environment; raise Refused, with the error's message, if it fails."""
    try:
        return vf.load_environment(resolve_config(opening))
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        raise Refused("; ".join(reasons)) from error
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def read_tasks(env: vf.Env, limit: int | None, skip: int) -> Iterator[dict[str, Any]]:
    """Yield {task, messages} for each task: its data, and messages for readers of the file.

    Raises Refused if the tasks are endless and there is no limit.
    """
    chosen = env.taskset.skip(skip)
    if limit is not None:
        chosen = chosen.take(limit)
    elif not chosen.bounded:
        raise Refused("it has tasks without end: say how many (--limit)")
    for task in chosen:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {"task": data, "messages": _messages(task.data)}


def _messages(data: vf.TaskData) -> list[dict[str, str]]:
    text = data.prompt_text or data.name or data.description or f"task {data.idx}"
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": text}]


class VerifiersPlayer:
    """Serves requests to play episodes, and verifiers' requests for turns of these episodes."""

    def __init__(self, env: vf.Env, token: str) -> None:
        self._env = env
        self._guard = Guard(token, "127.0.0.1")
        self._task_class = type(env.taskset).task_type()
        self._asking: dict[str, tuple[PlayerLine, vf.Trace]] = {}
        """The episode's request and the trace, by the trace's id, while an episode is played."""

    async def serve(self, announce: Callable[[int], None]) -> None:
        """Serve requests until standard input is closed; first call `announce` with the port."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        closed = asyncio.StreamReader()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(closed), sys.stdin)
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/play", self._play)
        app.router.add_post("/v1/chat/completions", self._hand_on)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        async with self._env.serving(), self._http, AsyncExitStack() as stack:
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, self._guard.host, 0).start()
            port = runner.addresses[0][1]
            client = vf.EvalClientConfig(
                base_url=f"http://127.0.0.1:{port}/v1", api_key_var="PLIMSOLL_NO_KEY"
            )
            self._context = vf.ModelContext(model=MODEL, client=client)
            announce(port)
            await closed.read()

    async def _play(self, request: web.Request) -> web.Response:
        if refusal := self._guard.refusal(request.headers):
            status, why = refusal
            return web.json_response({"failed": f" refused: {why}"}, status=status)
        body = await request.json()
        traces: list[vf.Trace] = []

        def watch(trace: vf.Trace) -> None:
            if trace.agent.config.client != self._context.client:
                return  # it has a model of its own
            if not trace.agent.trainable:
                name = trace.agent.name
                raise ValueError(
                    f"agent {name!r} is not to be trained, and would ask the policy. Give it a "
                    f"model of its own: {name}.model and {name}.client.base_url among the options"
                )
            traces.append(trace)
            self._asking[trace.id] = body, trace

        try:
            data = self._task_class.data_type().model_validate(body["task"])
            task = self._task_class(data, self._env.config.taskset.task)
            episode = await self._env.run_episode(task, self._context, on_trace=watch)
            return web.json_response(describe_result(episode, {trace.id for trace in traces}))
        except Exception as error:  # noqa: BLE001  the run shows it
            return web.json_response({"failed": f" raised {type(error).__name__}: {error}"})
        finally:
            for trace in traces:
                del self._asking[trace.id]

    async def _hand_on(self, request: web.Request) -> web.Response:
        """Forward a request for a turn to the policy's endpoint, and return its answer."""
        trace_id = request.headers.get(SESSION_ID_HEADER, "")
        addressed = is_addressed(request.headers, self._guard.host)
        if not addressed or trace_id not in self._asking:
            why = "The episode is over." if addressed else WRONG_HOST
            error = {"message": why, "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        episode, trace = self._asking[trace_id]
        url, key = f"{episode['base_url']}/chat/completions", f"Bearer {episode['api_key']}"
        headers = {"Authorization": key, "Content-Type": "application/json"}
        async with self._http.post(url, data=await request.read(), headers=headers) as answer:
            body = await answer.read()
            if answer.status == 400 and json.loads(body)["error"].get("code") == _REFUSED:
                # verifiers scores a stopped rollout, but not a failed one.
                trace.stop(_REFUSED)
            kind = answer.content_type
            return web.Response(body=body, status=answer.status, content_type=kind)


def describe_result(episode: vf.Episode, asking: set[str]) -> dict[str, Any]:
    """Return an episode's {reward, figures}, or {failed} with the reason, and lines if there are.

    Reward and figures are means of the traces that asked the policy.

    Args:
        episode: An episode that has ended.
        asking: The ids of the traces that may ask the policy.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for t in episode.traces for error in t.errors)]
        if not errors:
            return {"failed": " ended without success, and without an error"}
        lines = (errors[-1].traceback or "").splitlines()[-_TRACEBACK_LINES:]
        failed = f" raised {errors[-1].type}: {errors[-1].message}"
        return {"failed": failed, "lines": "\n".join(lines)}
    traces = [trace for trace in episode.traces if trace.id in asking and trace.num_turns]
    if not traces:
        return {"failed": " was over before it asked the policy"}
    values: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            values.setdefault(name, []).append(float(value))
        parts = {name: part.score for name, part in trace.rewards.items() if part is not None}
        for name, score in parts.items() if len(parts) > 1 else ():
            values.setdefault(f"reward_{name}", []).append(score)
    figures = {name: fmean(numbers) for name, numbers in values.items()}
    return {"reward": fmean(trace.reward for trace in traces), "figures": figures}


def main(what: str) -> None:
    """Run `check`, `tasks` or `play`, as the module's docstring describes."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(**line: object) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    with os.fdopen(os.dup(0), "rb", buffering=0) as first:  # the rest is the event loop's
        opening = json.loads(first.readline())
    version = verifiers.__version__
    try:
        env = open_environment(opening)
        if what == "play":
            player = VerifiersPlayer(env, opening["token"])
            asyncio.run(player.serve(lambda port: write(ready=version, port=port)))
            return
        write(ready=version)
        for task in read_tasks(env, opening["limit"], opening["skip"]) if what == "tasks" else ():
            write(**task)
    except Refused as error:
        write(refused=str(error))


if __name__ == "__main__":
    main(sys.argv[1])
