"""Serve the rewards and reward models of a config over HTTP.

`plimsoll serve-reward CONFIG.yaml`

Each reward has its own path: POST http://HOST:PORT/NAME. A single reward is also at /score and
/get_reward. Callers send JSON and the server's token (machine/guard.py). Plimsoll's and OpenRLHF's
request formats are read (reward/server_forms.py). Values have no weight or normalisation, as
these belong to the run that asks.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.cluster import NO_OWN_RANKS
from plimsoll.config.json_text import parse_json
from plimsoll.config.problems import refuse
from plimsoll.config.reward import RewardConfig, RewardModelConfig
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.machine.guard import Guard, TooLong, bind_socket, read_body, url_of
from plimsoll.page.serve import run_app
from plimsoll.records import RewardPart, Trajectory
from plimsoll.resolve.run_spec import RunSpec, resolve_changed
from plimsoll.reward.references import check_rewards
from plimsoll.reward.score import Scored, open_rewards
from plimsoll.reward.server_forms import read_request
from plimsoll.rl.reward_model import model_scores
from plimsoll.train.loading import load_measured

if TYPE_CHECKING:
    from starlette.applications import Starlette


_ALONE = {"where": "local", "ranks": 1, "sequence_parallel": 1, **NO_OWN_RANKS}

_ServedScore = Callable[[Sequence[Trajectory]], Future[Scored]]
"""Takes trajectories; starts to score them, and returns a future."""


@contextmanager
def _open_models(
    spec: RunSpec[RlConfig], names: Sequence[str]
) -> Iterator[dict[str, _ServedScore]]:
    """Yield the scoring functions of some reward models, by name; close the models at the end."""
    here = spec.written.cluster.model_copy(update=_ALONE)
    alone = resolve_changed(spec, {"cluster": here})
    with ThreadPoolExecutor(1) as thread:  # what begins in a thread goes on in it, as torch's do
        cluster = thread.submit(_load_models, alone, names).result()
        try:
            yield {
                name: partial(thread.submit, partial(_score, name, alone, cluster))
                for name in names
            }
        finally:
            thread.submit(cluster.close).result()


def _load_models(spec: RunSpec[RlConfig], names: Sequence[str]) -> Cluster:
    cluster = start_cluster(spec.cluster, ())
    for name in names:
        load_measured(cluster, spec, spec.scorer_of(name).name)
    return cluster


def _score(
    name: str, spec: RunSpec[RlConfig], cluster: Cluster, trajectories: Sequence[Trajectory]
) -> Scored:
    """Return the trajectories with a model's scores; raise ValueError if one cannot be read."""
    model = spec.config.scoring_models[name]
    readable = [_make_readable(trajectory, model) for trajectory in trajectories]
    scores = model_scores(readable, name, spec, cluster) if readable else []
    parts = [(RewardPart(name, score),) for score in scores]
    scored = (replace(t, rewards=rewards) for t, rewards in zip(trajectories, parts, strict=True))
    return Scored(tuple(scored), ())


def _make_readable(trajectory: Trajectory, model: RewardModelConfig) -> Trajectory:
    """Return a trajectory that a model can read.

    If the model has its own tokenizer, the prompt becomes a conversation. If the model reads the
    actor's tokens, raise ValueError if they are missing.
    """
    prompt = trajectory.prompt
    if model.tokenizer == "own":
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        return replace(trajectory, prompt=replace(prompt, messages=messages))
    if not len(prompt.tokens) or not len(trajectory.response_tokens):
        raise ValueError(
            "the model reads the actor's tokens (tokenizer: actor), and prompt_tokens or "
            "response_tokens are missing: ask in Plimsoll's format, or serve it with "
            "tokenizer: own, which reads texts"
        )
    return trajectory


HttpReply = tuple[int, dict[str, Any]]
"""An HTTP status, and JSON."""


def choose_rewards(
    config: str, flags: Sequence[str], name: str | None
) -> tuple[RunSpec[RlConfig], dict[str, RewardConfig], list[str]]:
    """Return a spec, its rewards and its reward models to serve; all, or only `name`.

    Raises ConfigError if there are none, or if a reward cannot be used here.
    """
    spec = load_any(config, flags)
    loaded = spec.config
    rewards = loaded.rewards if isinstance(loaded, RlConfig) else {}
    models = loaded.scoring_models if isinstance(loaded, RlConfig) else {}
    if not (rewards or models):
        raise ConfigError(
            f"{config} has no `rewards`, `reward_model` or `reward_models` to serve. Give a config "
            f"of plimsoll rl."
        )
    if name is not None and name not in (*rewards, *models):
        names = ", ".join((*rewards, *models))
        raise ConfigError(f"{config} has no reward {name!r}. It has: {names}.")
    chosen = {key: reward for key, reward in rewards.items() if name in (None, key)}
    refuse(check_rewards(chosen))
    return spec, chosen, [key for key in models if name in (None, key)]


def serve(
    spec: RunSpec[RlConfig],
    rewards: Mapping[str, RewardConfig],
    models: Sequence[str],
    host: str,
    port: int,
) -> None:
    """Serve requests until the process is interrupted; raise ConfigError for a used address."""
    with ExitStack() as stack:
        place = stack.enter_context(bind_socket(host, port))
        served: dict[str, _ServedScore] = {
            name: replace(
                stack.enter_context(open_rewards({name: reward})), source="the request"
            ).submit
            for name, reward in rewards.items()
        }
        if models:
            served |= stack.enter_context(_open_models(spec, models))
        guard = Guard(os.environ.get(TOKEN) or secrets.token_urlsafe(24), host)
        shown = f"${TOKEN}" if os.environ.get(TOKEN) else guard.token  # a chosen one stays secret
        print(f"Header of every caller: Authorization, with Bearer and: {shown}")
        for path in _paths(served):
            print(f"POST {url_of(host, place)}{path}", flush=True)
        run_app(_app(_paths(served), guard), place)


TOKEN = "PLIMSOLL_REWARD_TOKEN"
"""The environment variable of the token that callers send; without it the token is random."""


async def answer(submit: _ServedScore, body: bytes) -> HttpReply:
    """Return the HTTP status and JSON for a request's body.

    The status is 200 with the rewards; 422 if the request or a reward's value is wrong; 500 if a
    reward failed and the request has OpenRLHF's format, which cannot express a failed reward.
    """
    try:
        request = parse_json(body)
        if not isinstance(request, Mapping):
            raise ValueError("an object is needed")
        trajectories = [replace(t, group=place) for place, t in enumerate(read_request(request))]
        scored = await asyncio.wrap_future(submit(trajectories))
    except (ValueError, PlimsollError) as error:
        return 422, {"detail": str(error)}
    rewards = _rewards(trajectories, scored)
    if "trajectories" in request:
        return 200, {"rewards": rewards}
    if failed := [reward["failed"] for reward in rewards if isinstance(reward, dict)]:
        return 500, {"detail": failed[0]}
    return 200, {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def _rewards(trajectories: Sequence[Trajectory], scored: Scored) -> list[object]:
    """Return a number for each trajectory, or {"failed": text} if its reward gave no number."""
    values: dict[int, object] = {t.group: _number(t.rewards[0].value) for t in scored.trajectories}
    failed: dict[int, object] = {
        failure.group: {"failed": str(failure)} for failure in scored.failures
    }
    return [(values | failed)[trajectory.group] for trajectory in trajectories]


def _number(reward: float) -> object:
    """Return a reward for JSON, which has no NaN and no infinity."""
    if math.isfinite(reward):
        return reward
    return {"failed": f"The reward is {reward}, which JSON cannot carry. Return a finite number."}


def _paths(served: Mapping[str, _ServedScore]) -> dict[str, _ServedScore]:
    """Return the scoring function at each URL path."""
    paths = {f"/{name}": submit for name, submit in served.items()}
    if len(served) == 1:
        (only,) = served.values()
        paths |= {"/score": only, "/get_reward": only}
    return paths


def _app(paths: Mapping[str, _ServedScore], guard: Guard) -> Starlette:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def score(request: Request) -> JSONResponse:
        if refusal := guard.refusal(request.headers):
            status, why = refusal
            return JSONResponse({"detail": why}, status)
        try:
            body = await read_body(request.stream())
        except TooLong as error:
            return JSONResponse({"detail": str(error)}, 413)
        status, content = await answer(paths[request.url.path], body)
        return JSONResponse(content, status)

    scored = [Route(path, score, methods=["POST"]) for path in paths]
    return Starlette(routes=[Route("/health", health), *scored])
