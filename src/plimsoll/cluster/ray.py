"""Ranks and engines as Ray actors, supervised: whoever dies is named, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from plimsoll.config.cluster import ClusterConfig
from plimsoll.engine.process_group import Place, choose_device, free_port
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError, WorkerDied
from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import EngineSpec, Request

R = TypeVar("R")

_CULPRIT_SECONDS = 10.0
"""How long to wait for a death notice after an error that another's death may have caused."""


@dataclass(frozen=True)
class Member:
    """An actor, and what messages call it: "training rank 1 (pid 4711, node ...)"."""

    name: str
    actor: Any


class RankActor:
    """Hosts one `Worker`.

    Consumes: calls of the controller, in order. Waits for: other ranks, inside collectives.
    Unblocked by: the controller making the same call on every rank. Produces: results.
    `watch` runs beside them and never returns: its reference fails when the process dies.
    """

    def host(self) -> tuple[int, str, int]:
        """(pid, node's address, a free port): known before the process group is made."""
        return os.getpid(), ray.util.get_node_ip_address(), free_port()

    def start(self, place: Place) -> None:
        self._worker = Worker(place)

    def call(self, method: str, *arguments: object) -> Any:
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        threading.Event().wait()


class EngineActor:
    """Hosts one `RolloutEngine`; many calls run at once.

    Consumes: requests and weights from the controller. Waits for: its engine. Unblocked by: its
    engine's progress. Produces: trajectories. `watch` returns or fails only when the engine died.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    async def host(self) -> tuple[int, str, int]:
        return os.getpid(), ray.util.get_node_ip_address(), 0

    async def start(self) -> int:
        if self._spec.rollout.engine == "vllm":
            from plimsoll.rollout.vllm import VllmEngine

            self._engine: Any = VllmEngine(self._spec)
        else:
            from plimsoll.rollout.transformers import TransformersEngine

            self._engine = TransformersEngine(self._spec)
        return int(self._engine.prompts_per_request)

    async def call(self, method: str, *arguments: object) -> Any:
        return await getattr(self._engine, method)(*arguments)

    async def watch(self) -> str:
        return str(await self._engine.watch())


class RayCluster:
    """A `Cluster` of Ray actors."""

    def __init__(self, config: ClusterConfig, specs: Sequence[EngineSpec], threads: int) -> None:
        self.ranks = config.ranks
        self.engines = len(specs)
        self._owns_ray = config.address is None
        self._watches: dict[Any, Member] = {}
        _start_ray(config)
        try:
            self._start_members(config, specs, threads)
        except BaseException:
            self.close()
            raise

    def _start_members(
        self, config: ClusterConfig, specs: Sequence[EngineSpec], threads: int
    ) -> None:
        device = choose_device(config.device)
        gpus = 1 if device == "cuda" else 0
        environment = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": device}
        ranks = [_rank_actor(gpus, environment) for _ in range(config.ranks)]
        engines = [_engine_actor(spec, device) for spec in specs]
        hosts = self._get([a.host.remote() for a in (*ranks, *engines)], config.start_timeout)
        self._ranks = [_member(f"training rank {i}", a, hosts[i]) for i, a in enumerate(ranks)]
        self._engines = [
            _member(f"rollout engine {i}", a, hosts[len(ranks) + i]) for i, a in enumerate(engines)
        ]
        for member in self._ranks:
            self._watches[member.actor.watch.remote()] = member
        place = Place(0, config.ranks, 0, hosts[0][1], hosts[0][2], device, threads)
        starting = {
            m.actor.start.remote(replace(place, rank=i)): m for i, m in enumerate(self._ranks)
        } | {m.actor.start.remote(): m for m in self._engines}
        results = self._wait(starting, timeout=config.start_timeout)
        self._prompts_per_request = int(results[-1]) if engines else 0
        for member in self._engines:
            self._watches[member.actor.watch.remote()] = member

    def each(self, task: Callable[..., R], arguments: Sequence[tuple[object, ...]]) -> list[R]:
        calls = {
            member.actor.call.remote(task.__name__, *own): member
            for member, own in zip(self._ranks, arguments, strict=True)
        }
        return self._wait(calls)

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        return self.each(task, [arguments] * self.ranks)

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Trajectory]]:
        calls = {
            member.actor.call.remote("generate", request): member
            for member, request in _spread(self._engines, requests)
        }
        for _, trajectories in self._as_done(calls):
            yield trajectories

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        calls = {m.actor.call.remote(task.__name__, *arguments): m for m in self._engines}
        return self._wait(calls)

    def hand_over(
        self,
        gather: Callable[..., R | None],
        arguments: tuple[object, ...],
        receive: Callable[..., Any],
    ) -> None:
        gathering = {m.actor.call.remote(gather.__name__, *arguments): m for m in self._ranks}
        first = next(iter(gathering))
        receiving = {m.actor.call.remote(receive.__name__, first): m for m in self._engines}
        # The bucket stays in the object store: engines fetch it from there, not from here.
        for _ in self._as_done(gathering | receiving, keep=first):
            pass

    def prompts_per_request(self) -> int:
        return self._prompts_per_request

    def close(self) -> None:
        for member in getattr(self, "_engines", ()):
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get(member.actor.call.remote("stop"), timeout=10)
        for member in (*getattr(self, "_engines", ()), *getattr(self, "_ranks", ())):
            ray.kill(member.actor)
        self._watches.clear()
        if self._owns_ray:
            ray.shutdown()

    def _wait(self, calls: Mapping[Any, Member], timeout: float | None = None) -> list[Any]:
        """The results of all calls, in their order."""
        results = dict(self._as_done(calls, timeout=timeout))
        return [results[reference] for reference in calls]

    def _as_done(
        self, calls: Mapping[Any, Member], keep: Any = None, timeout: float | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """(reference, result) of each call as it ends; deaths of any member end it too."""
        pending = dict(calls)
        while pending:
            ready, _ = ray.wait([*pending, *self._watches], num_returns=1, timeout=timeout)
            if not ready:
                names = ", ".join(m.name for m in pending.values())
                raise PlimsollError(
                    f"{names}: no answer within {timeout:.0f} s (cluster.start_timeout); "
                    f"logs: {_log_directory()}"
                )
            reference = ready[0]
            if reference in self._watches:
                raise self._death(reference)
            member = pending.pop(reference)
            yield reference, None if reference is keep else self._result(reference, member)

    def _result(self, reference: Any, member: Member) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as error:
            raise WorkerDied(_died(member, error)) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, PlimsollError):
                raise cause from error
            dead, _ = ray.wait(list(self._watches), num_returns=1, timeout=_CULPRIT_SECONDS)
            if dead:
                raise self._death(dead[0]) from error
            raise PlimsollError(
                f"{member.name} failed: {type(cause).__name__}: {cause}\n{error}"
            ) from error

    def _death(self, watch: Any) -> WorkerDied:
        member = self._watches[watch]
        try:
            reason = str(ray.get(watch))
        except RayError as error:
            return WorkerDied(_died(member, error))
        return WorkerDied(f"{member.name} died: {reason}; logs: {_log_directory()}")

    def _get(self, references: list[Any], timeout: float) -> list[Any]:
        try:
            return list(ray.get(references, timeout=timeout))
        except GetTimeoutError as error:
            raise PlimsollError(
                f"Ray could not start all processes in {timeout:.0f} s (cluster.start_timeout): "
                f"the cluster has {ray.cluster_resources()}. Ask for fewer ranks or engines, or "
                "wait for other jobs"
            ) from error


def _start_ray(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address=config.address,
        include_dashboard=False if config.address is None else None,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
    )


def _rank_actor(gpus: int, environment: dict[str, str]) -> Any:
    remote = ray.remote(num_cpus=0, num_gpus=gpus, concurrency_groups={"watch": 1})(RankActor)
    return remote.options(runtime_env={"env_vars": environment}).remote()


def _engine_actor(spec: EngineSpec, device: str) -> Any:
    from plimsoll.rollout.vllm import environment

    return (
        ray.remote(EngineActor)
        .options(
            num_cpus=0,
            num_gpus=spec.rollout.tensor_parallel if device == "cuda" else 0,
            max_concurrency=10_000,
            runtime_env={"env_vars": environment(spec)},
        )
        .remote(spec)
    )


def _member(name: str, actor: Any, host: tuple[int, str, int]) -> Member:
    return Member(f"{name} (pid {host[0]}, node {host[1]})", actor)


def _spread(
    engines: Sequence[Member], requests: Sequence[Request]
) -> Iterator[tuple[Member, Request]]:
    for i, request in enumerate(requests):
        yield engines[i % len(engines)], request


def _died(member: Member, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{member.name} died: {' '.join(lines)[:600]}; logs: {_log_directory()}"


def _log_directory() -> str:
    node = ray._private.worker._global_node
    return "unknown" if node is None else str(node.get_logs_dir_path())
