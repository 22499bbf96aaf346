"""Play episodes of a verifiers environment, many side by side, with a policy elsewhere.

    python player.py check|tasks|play

The first line on standard input says what to open: {taskset, environment, options}; the answer is
{ready: VERSION} or {refused: WHY}. `tasks` then writes {task, messages} for each task. `play`
consumes these lines until standard input is closed, which ends it:

    {episode, task, base_url, api_key}    begin an episode, with the policy at this address
    {episode, close}                      give it up

and produces:

    {episode, reward, figures}            the episode is over
    {episode, failed, lines}              the episode has no score
    {episode, closed}                     the episode is given up; the answer comes at once

An episode waits for the policy and for what the environment does. verifiers asks for turns at a
port of this machine that the player itself serves: it hands each turn on to the address of the
episode that it is of. What is printed goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import aiohttp
import verifiers
import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError
from verifiers.v1.clients.client import SESSION_ID_HEADER

MODEL = "policy"
HARNESS = "plimsoll-chat"
"""The file plimsoll_chat.py beside this one."""
_REFUSED = "refused"
"""The code of the endpoint's error for a turn beyond the limits of an episode."""
_TRACEBACK_LINES = 20
_LONGEST_LINE = 2**28

Line = Mapping[str, Any]
Write = Callable[[Line], None]


class Refused(Exception):
    """An environment cannot be opened; the text says why."""


def resolve_config(opening: Line) -> vf.EnvConfig:
    """Return the config of an environment.

    If its options do not say otherwise, each agent talks in this process and its tools run on this
    machine: verifiers' own defaults are a shell for the policy, in a sandbox that costs money.
    """
    taskset, environment = opening["taskset"], opening["environment"]
    options: dict[str, Any] = dict(opening["options"])
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    kind = vf.env_config_type(taskset, environment)
    for name, key in kind.model_fields.items():
        if isinstance(key.default, vf.AgentConfig):
            options[name] = _with_defaults(options.get(name) or {}, key.default, taskset)
    return vf.resolve_env_config({**options, "id": environment})


def _with_defaults(given: Line, default: vf.AgentConfig, taskset: str) -> dict[str, Any]:
    settled, agent = {*given, *default.model_fields_set}, dict(given)
    if "runtime" not in settled:
        agent["runtime"] = {"type": "subprocess"}
    if "harness" not in settled and vf.default_harness_id(taskset) == "bash":
        agent["harness"] = {"id": HARNESS}
    return agent


def open_environment(opening: Line) -> vf.Env:
    """Return the environment. Raises Refused with the message of verifiers or of its package."""
    try:
        return vf.load_environment(resolve_config(opening))
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        raise Refused("; ".join(reasons)) from error
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def read_tasks(env: vf.Env, limit: int | None, skip: int) -> Iterator[dict[str, Any]]:
    """Yield the data of each task, with messages by which a reader knows the task."""
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


@dataclass
class PlayedEpisode:
    """An episode that is being played."""

    base_url: str
    api_key: str
    traces: dict[str, vf.Trace] = field(default_factory=dict)
    """The traces of its agents, by their ids."""
    asked: set[str] = field(default_factory=set)
    """The ids of the traces that asked the policy."""
    failure: str = ""
    """What is wrong with the episode, besides what verifiers says."""


def describe_result(played: PlayedEpisode, episode: vf.Episode) -> dict[str, Any]:
    """Return the result of an episode that is over: the means over the traces that the policy
    played."""
    if not episode.ok:
        errors = [*episode.errors, *(error for t in episode.traces for error in t.errors)]
        if not errors:
            return {"failed": " ended without success, and without an error"}
        lines = (errors[-1].traceback or "").splitlines()[-_TRACEBACK_LINES:]
        failed = f" raised {errors[-1].type}: {errors[-1].message}"
        return {"failed": failed, "lines": "\n".join(lines)}
    traces = [trace for trace in episode.traces if trace.id in played.asked]
    if not traces:
        return {"failed": " was over before it asked the policy"}
    return {"reward": fmean(trace.reward for trace in traces), "figures": _figures(traces)}


def _figures(traces: list[vf.Trace]) -> dict[str, float]:
    """Return means of metrics, and of the parts of the reward if there are several."""
    values: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            values.setdefault(name, []).append(float(value))
        given = {name: part for name, part in trace.rewards.items() if part is not None}
        for name, part in given.items() if len(given) > 1 else ():
            values.setdefault(f"reward_{name}", []).append(part.score)
    return {name: fmean(numbers) for name, numbers in values.items()}


class Player:
    """Plays the episodes of an open environment, and writes what becomes of them."""

    def __init__(self, env: vf.Env, write: Write) -> None:
        self._env, self._write = env, write
        self._task_class = type(env.taskset).task_type()
        self._episodes: dict[int, PlayedEpisode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Play until there are no more lines."""
        async with AsyncExitStack() as stack:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
            app = web.Application(client_max_size=_LONGEST_LINE)
            app.router.add_post("/v1/chat/completions", self._hand_on)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            client = vf.EvalClientConfig(
                base_url=f"http://127.0.0.1:{port}/v1", api_key_var="PLIMSOLL_NO_KEY"
            )
            self._context = vf.ModelContext(model=MODEL, client=client)
            await stack.enter_async_context(self._env.serving())
            self._write({"ready": verifiers.__version__})
            try:
                while line := await lines.readline():
                    self._read(json.loads(line))
            finally:
                for task in [*self._tasks.values()]:
                    task.cancel()
                await self._http.close()  # which ends the turns that wait for the policy
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _read(self, line: Line) -> None:
        number = line["episode"]
        if "task" in line:
            self._episodes[number] = PlayedEpisode(line["base_url"], line["api_key"])
            self._tasks[number] = asyncio.create_task(self._play(number, line["task"]))
            return
        self._write({"episode": number, "closed": True})
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _play(self, number: int, data: Line) -> None:
        played = self._episodes[number]
        try:
            read = self._task_class.data_type().model_validate(data)
            task = self._task_class(read, self._env.config.taskset.task)
            episode = await self._env.run_episode(
                task,
                self._context,
                on_trace=lambda trace: played.traces.__setitem__(trace.id, trace),
            )
            result = describe_result(played, episode)
        except asyncio.CancelledError:
            if not played.failure:  # given up
                raise
            result = {"failed": played.failure}
        except Exception as error:  # noqa: BLE001  the run shows it
            result = {"failed": f" raised {type(error).__name__}: {error}"}
        finally:
            del self._episodes[number], self._tasks[number]
        self._write({"episode": number, **result})

    async def _hand_on(self, request: web.Request) -> web.Response:
        """Have the policy answer a turn that verifiers asks for."""
        trace_id = request.headers.get(SESSION_ID_HEADER, "")
        numbers = (n for n, played in self._episodes.items() if trace_id in played.traces)
        number = next(numbers, None)
        if number is None:
            return _error("The episode is over.")
        played = self._episodes[number]
        trace = played.traces[trace_id]
        if not trace.agent.trainable:
            name = trace.agent.name
            played.failure = (
                f"'s agent {name!r} is not to be trained, and asks the policy. Give it a model of "
                f"its own: {name}.model and {name}.client.base_url among the options"
            )
            self._tasks[number].cancel()
            return _error(played.failure)
        played.asked.add(trace_id)
        url, key = f"{played.base_url}/chat/completions", f"Bearer {played.api_key}"
        headers = {"Authorization": key, "Content-Type": "application/json"}
        body = await request.read()
        async with self._http.post(url, data=body, headers=headers) as answer:
            content = await answer.read()
            if answer.status == 400 and json.loads(content)["error"].get("code") == _REFUSED:
                # A rollout that is stopped is scored as it is; one that fails is not scored.
                trace.stop(_REFUSED)
            kind = answer.content_type
            return web.Response(body=content, status=answer.status, content_type=kind)


def _error(why: str) -> web.Response:
    error = {"message": why, "type": "invalid_request_error"}
    return web.json_response({"error": error}, status=400)


async def _play_all(env: vf.Env, write: Write) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    lines = asyncio.StreamReader(limit=_LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Player(env, write).serve(lines)


def main(what: str) -> None:
    """Check, list or play; see above."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(line: Line) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    with os.fdopen(os.dup(0), "rb", buffering=0) as first:  # further lines are the event loop's
        opening = json.loads(first.readline())
    try:
        env = open_environment(opening)
        if what == "play":
            asyncio.run(_play_all(env, write))
            return
        write({"ready": verifiers.__version__})
        for task in read_tasks(env, opening["limit"], opening["skip"]) if what == "tasks" else ():
            write(task)
    except Refused as error:
        write({"refused": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
