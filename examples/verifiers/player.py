"""Play episodes of a verifiers environment, with a policy behind an OpenAI-compatible endpoint.

    python player.py tasks ENVIRONMENT --out tasks.jsonl      # its tasks as rows
    python player.py play ENVIRONMENT --socket player.sock    # serves until Ctrl-C

It runs in a virtual environment that has verifiers. ENVIRONMENT is TASKSET, or ENV+TASKSET. The
player serves HTTP in two places:

    player.sock                POST /play {task, base_url, api_key} -> {reward, figures} or
                               {failed}; only this user can open the socket
    a free port of 127.0.0.1   POST /v1/chat/completions: verifiers asks for a turn, with the random
                               id of the episode's trace as its key; the request is forwarded to the
                               base_url of the turn's episode

An episode is cancelled when its request is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from pydantic import ValidationError
from verifiers.v1.clients.client import SESSION_ID_HEADER

MODEL = "policy"
HARNESS = "plimsoll-chat"
"""The harness in plimsoll_chat.py, beside this file: verifiers finds it on `sys.path`."""
_REFUSED = "refused"
"""The error code of Plimsoll's endpoint for a turn beyond the limits of an episode."""
_MAX_BODY = 2**28

Json = Mapping[str, Any]


def resolve_config(name: str, given: Json) -> vf.EnvConfig:
    """Return the verifiers config of the environment to open.

    Unless the options say otherwise, each agent talks in this process and its tools run on this
    machine. verifiers' defaults would give the policy a shell, in a sandbox that costs money.
    """
    environment, _, taskset = name.rpartition("+")
    options: dict[str, Any] = dict(given)
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    kind = vf.env_config_type(taskset, environment)
    for agent, key in kind.model_fields.items():
        if isinstance(key.default, vf.AgentConfig):
            options[agent] = _with_defaults(options.get(agent) or {}, key.default, taskset)
    return vf.resolve_env_config({**options, "id": environment})


def _with_defaults(given: Json, default: vf.AgentConfig, taskset: str) -> dict[str, Any]:
    settled, agent = {*given, *default.model_fields_set}, dict(given)
    if "runtime" not in settled:
        agent["runtime"] = {"type": "subprocess"}
    if "harness" not in settled and vf.default_harness_id(taskset) == "bash":
        agent["harness"] = {"id": HARNESS}
    return agent


def open_environment(name: str, options: Json) -> vf.Env:
    """Return the opened environment; end with the reason if a key of its config is wrong."""
    try:
        return vf.load_environment(resolve_config(name, options))
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        raise SystemExit(f"verifiers cannot open {name}: {'; '.join(reasons)}") from None


def read_tasks(env: vf.Env, limit: int | None, skip: int) -> Iterator[dict[str, Any]]:
    """Yield {task, messages} for each task: its data, and messages for readers of the file.

    Ends with a message if the tasks are endless and there is no limit.
    """
    chosen = env.taskset.skip(skip)
    if limit is not None:
        chosen = chosen.take(limit)
    elif not chosen.bounded:
        raise SystemExit("The tasks are endless: say how many with --limit.")
    for task in chosen:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {"task": data, "messages": _messages(task.data)}


def _messages(data: vf.TaskData) -> list[dict[str, str]]:
    text = data.prompt_text or data.name or data.description or f"task {data.idx}"
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": text}]


class Player:
    """Serves requests to play episodes, and verifiers' requests for turns of these episodes."""

    def __init__(self, env: vf.Env) -> None:
        self._env = env
        self._task_class = type(env.taskset).task_type()
        self._asking: dict[str, tuple[Json, vf.Trace]] = {}
        """The episode's request and the trace, by the trace's id, while an episode is played."""

    async def serve(self, socket: Path) -> None:
        """Serve requests at a Unix socket until Ctrl-C."""
        plays, asks = (web.Application(client_max_size=_MAX_BODY) for _ in range(2))
        plays.router.add_post("/play", self._play)
        asks.router.add_post("/v1/chat/completions", self._forward)
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        os.umask(0o077)  # of the socket, too
        async with self._env.serving(), self._http, AsyncExitStack() as stack:
            runners = [
                web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
                for app in (plays, asks)
            ]
            for runner in runners:
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runners[1], "127.0.0.1", 0).start()
            port = runners[1].addresses[0][1]
            client = vf.EvalClientConfig(
                base_url=f"http://127.0.0.1:{port}/v1", api_key_var="PLIMSOLL_NO_KEY"
            )
            self._context = vf.ModelContext(model=MODEL, client=client)
            await web.UnixSite(runners[0], str(socket)).start()
            print(f"ready at {socket}", flush=True)
            await asyncio.Event().wait()

    async def _play(self, request: web.Request) -> web.Response:
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
            return web.json_response({"failed": f"{type(error).__name__}: {error}"})
        finally:
            for trace in traces:
                del self._asking[trace.id]

    async def _forward(self, request: web.Request) -> web.Response:
        """Forward a request for a turn to the policy's endpoint, and return its answer."""
        trace_id = request.headers.get(SESSION_ID_HEADER, "")
        if trace_id not in self._asking:
            error = {"message": "The episode is over.", "type": "invalid_request_error"}
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
    """Return an episode's {reward, figures}, or {failed} with the reason.

    Reward and figures are means of the traces that asked the policy.

    Args:
        episode: An episode that has ended.
        asking: The ids of the traces that may ask the policy.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for t in episode.traces for error in t.errors)]
        why = [f"{error.type}: {error.message}" for error in errors] or ["no success, and no error"]
        return {"failed": why[-1]}
    traces = [trace for trace in episode.traces if trace.id in asking and trace.num_turns]
    if not traces:
        return {"failed": "The episode was over before it asked the policy."}
    values: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            values.setdefault(name, []).append(float(value))
        parts = {name: part.score for name, part in trace.rewards.items() if part is not None}
        for name, score in parts.items() if len(parts) > 1 else ():
            values.setdefault(f"reward_{name}", []).append(score)
    figures = {name: fmean(numbers) for name, numbers in values.items()}
    return {"reward": fmean(trace.reward for trace in traces), "figures": figures}


def main() -> None:
    """Run `tasks` or `play`, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tasks", "play"])
    parser.add_argument("environment", help="TASKSET, or ENV+TASKSET")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: keys of its config")
    parser.add_argument("--out", type=Path, default=Path("tasks.jsonl"))
    parser.add_argument("--limit", type=int, help="at most so many tasks")
    parser.add_argument("--skip", type=int, default=0, help="leave the first tasks out")
    parser.add_argument("--socket", type=Path, default=Path("player.sock"))
    given = parser.parse_args()
    env = open_environment(given.environment, given.options)
    if given.what == "play":
        with suppress(KeyboardInterrupt):
            asyncio.run(Player(env).serve(given.socket))
        return
    rows = [
        json.dumps(task, ensure_ascii=False) for task in read_tasks(env, given.limit, given.skip)
    ]
    given.out.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} tasks are in {given.out}")


if __name__ == "__main__":
    main()
