"""The rewards and reward models of a config over HTTP.

`plimsoll serve-reward CONFIG.yaml`

Each has its name: POST http://HOST:PORT/NAME; a single one is also at /score and /get_reward. Both
request formats are read (reward/servers/formats.py). Values come before weight and normalisation,
which belong to the run that asks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plimsoll.commands.served_models import ServedScore, open_models
from plimsoll.config.problems import refuse
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.page.serve import bind_socket, run_app
from plimsoll.records import Trajectory
from plimsoll.reward.references import check_rewards
from plimsoll.reward.score import Scored, open_rewards
from plimsoll.reward.servers.formats import read_request
from plimsoll.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from starlette.applications import Starlette

HttpReply = tuple[int, dict[str, Any]]
"""An HTTP status, and JSON."""


@dataclass(frozen=True)
class ServedRewards:
    """The rewards to serve: parts of the reward and reward models of this run, by name."""

    spec: RunSpec[RlConfig]
    rewards: Mapping[str, RewardConfig]
    models: tuple[str, ...]


def choose_rewards(config: str, flags: Sequence[str], name: str | None) -> ServedRewards:
    """Return the rewards and reward models of a config (or of one name), or raise ConfigError."""
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
    return ServedRewards(spec, chosen, tuple(key for key in models if name in (None, key)))


def serve(chosen: ServedRewards, host: str, port: int) -> None:
    """Answer requests until it is interrupted, or raise ConfigError if the address is taken."""
    with ExitStack() as stack:
        place = stack.enter_context(bind_socket(host, port))
        served: dict[str, ServedScore] = {
            name: replace(
                stack.enter_context(open_rewards({name: reward})), source="the request"
            ).submit
            for name, reward in chosen.rewards.items()
        }
        if chosen.models:
            served |= stack.enter_context(open_models(chosen.spec, chosen.models))
        for path in _paths(served):
            print(f"POST http://{host}:{place.getsockname()[1]}{path}", flush=True)
        run_app(_app(_paths(served)), place)


async def answer(submit: ServedScore, body: bytes) -> HttpReply:
    """Return the reply to a request.

    It is 200 with the rewards; 500 if OpenRLHF's format has no place for one that failed; 422 if
    the request, or what the reward returned, is wrong.
    """
    try:
        request = json.loads(body)
        if not isinstance(request, Mapping):
            raise ValueError("an object is needed")
        trajectories = [replace(t, group=place) for place, t in enumerate(read_request(request))]
        scored = await asyncio.wrap_future(submit(trajectories))
    except (ValueError, PlimsollError) as error:
        return 422, {"detail": str(error)}
    if "trajectories" in request:
        return 200, {"rewards": _rewards(trajectories, scored)}
    if scored.failures:
        return 500, {"detail": str(scored.failures[0])}
    rewards = [t.rewards[0].value for t in scored.trajectories]
    return 200, {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def _rewards(trajectories: Sequence[Trajectory], scored: Scored) -> list[object]:
    """Return a number for each trajectory, or the error of its reward."""
    values: dict[int, object] = {t.group: t.rewards[0].value for t in scored.trajectories}
    failed: dict[int, object] = {
        failure.group: {"failed": str(failure)} for failure in scored.failures
    }
    return [(values | failed)[trajectory.group] for trajectory in trajectories]


def _paths(served: Mapping[str, ServedScore]) -> dict[str, ServedScore]:
    """Return the reward at each path."""
    paths = {f"/{name}": submit for name, submit in served.items()}
    if len(served) == 1:
        (only,) = served.values()
        paths |= {"/score": only, "/get_reward": only}
    return paths


def _app(paths: Mapping[str, ServedScore]) -> Starlette:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def score(request: Request) -> JSONResponse:
        status, content = await answer(paths[request.url.path], await request.body())
        return JSONResponse(content, status)

    scored = [Route(path, score, methods=["POST"]) for path in paths]
    return Starlette(routes=[Route("/health", health), *scored])
