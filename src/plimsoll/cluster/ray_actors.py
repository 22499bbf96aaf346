"""What runs in Ray's processes: one actor hosts a training rank, or an engine that samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from plimsoll.cluster.blame import told, vllm_exception_in, why_dead
from plimsoll.engine.process_group import Place, free_port
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError
from plimsoll.rollout.protocol import EngineSpec


@dataclass(frozen=True)
class Host:
    """Where an actor lives. port: free on its node. log: of its process; see `blame`."""

    pid: int
    node: str
    port: int
    log: str


@dataclass(frozen=True)
class Member:
    """An actor, and what messages call it: "training rank 1 (pid 4711 on node 10.0.0.1)"."""

    role: str
    actor: Any
    host: Host

    @property
    def name(self) -> str:
        return f"{self.role} (pid {self.host.pid} on node {self.host.node})"


class RankActor:
    """Hosts one `Worker`.

    Consumes: calls of the controller, in order. Waits for: other ranks, inside collectives.
    Unblocked by: the controller making the same call on every rank. Produces: results.
    `watch` runs beside them and never returns: its reference fails when the process dies.
    """

    def host(self) -> Host:
        """Known before the process group is made."""
        return _own_host()

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

    async def host(self) -> Host:
        return _own_host()

    async def start(self) -> int:
        """Load the model; returns the engine's `responses_per_request`."""
        if self._spec.rollout.engine == "vllm":
            self._engine: Any = _start_vllm(self._spec)
        else:
            from plimsoll.rollout.transformers import TransformersEngine

            self._engine = TransformersEngine(self._spec)
        return int(self._engine.responses_per_request)

    async def call(self, method: str, *arguments: object) -> Any:
        return await getattr(self._engine, method)(*arguments)

    async def watch(self) -> str:
        reason = str(await self._engine.watch())
        said = vllm_exception_in(_own_log())
        return f"{reason} after {said}" if said else reason


def create_ranks(count: int, device: str, threads: int) -> list[Any]:
    """Ask Ray for the actors of all training ranks."""
    remote = ray.remote(concurrency_groups={"watch": 1})(RankActor)
    environment = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": device}
    options = remote.options(
        num_cpus=0,
        num_gpus=1 if device == "cuda" else 0,
        runtime_env={"env_vars": environment},
    )
    return [options.remote() for _ in range(count)]


def create_engine(spec: EngineSpec, device: str) -> Any:
    """Ask Ray for the actor of one engine."""
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


def members(roles: Sequence[str], actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all actors have a process."""
    try:
        hosts = ray.get([actor.host.remote() for actor in actors], timeout=timeout)
    except GetTimeoutError as error:
        raise PlimsollError(
            f"Ray could not start all processes in {timeout:.0f} s (cluster.start_timeout): "
            f"the cluster has {ray.cluster_resources()}. Ask for fewer ranks or engines, or "
            "wait for other jobs"
        ) from error
    except RayActorError as error:
        raise PlimsollError(f"Ray could not start a process: {why_dead(str(error))}") from error
    return [Member(*three) for three in zip(roles, actors, hosts, strict=True)]


def _own_host() -> Host:
    return Host(os.getpid(), ray.util.get_node_ip_address(), free_port(), _own_log())


def _own_log() -> str:
    return str(ray._private.worker.global_worker.get_err_file_path()).removesuffix(".err")


def _start_vllm(spec: EngineSpec) -> Any:
    from plimsoll.rollout.vllm import VllmEngine, start_settings

    try:
        return VllmEngine(spec)
    except (RuntimeError, ValueError, OSError) as error:
        # What goes wrong in the process that vLLM starts is only in the log that they share.
        cause = (isinstance(error, RuntimeError) and vllm_exception_in(_own_log())) or str(error)
        what = f"rollout engine {spec.index}: vLLM could not start"
        why = f"{cause}\n  Settings: {start_settings(spec)}"
        raise PlimsollError(told(what, why, _own_log())) from error
