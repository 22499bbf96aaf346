"""What runs in Ray's processes: one actor hosts a training rank, or an engine that samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from plimsoll.cluster.blame import tells_of_shortage, told, vllm_exception_in, why_dead
from plimsoll.cluster.seats import Seat
from plimsoll.config.allocator import preloading
from plimsoll.config.threads import waiting
from plimsoll.engine.process_group import Place, free_port
from plimsoll.engine.shortage import telling_shortage
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError
from plimsoll.memory.explain.incident import Incident, OutOfMemory
from plimsoll.memory.machine.node_state import NodeState, read_node
from plimsoll.memory.machine.nvidia import visible_cards
from plimsoll.rollout.protocol import EngineSpec

_LOOK_SECONDS = 20.0


@dataclass(frozen=True)
class Host:
    """Where an actor lives. port: free on its node. log: of its process; see `blame`.
    cards: the GPUs that Ray gave it, on the Ray node `node_id`, as CUDA_VISIBLE_DEVICES names them:
    by numbers, or by UUIDs where the node's own variable does."""

    pid: int
    node: str
    port: int
    log: str
    node_id: str
    cards: tuple[str, ...]

    def card(self, node: NodeState) -> int | None:
        """The number of its first card on its node; None on CPU, or where it is not known."""
        return next((c.index for c in visible_cards(node.cards, ",".join(self.cards))), None)


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
        return self._worker.do(method, *arguments)

    def look(self, pids: Sequence[int]) -> NodeState:
        """This node, of which these processes are the run's."""
        return read_node(pids)

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
        with telling_shortage(torch.device(self._spec.device), lambda: "rollout"):
            return await getattr(self._engine, method)(*arguments)

    async def watch(self) -> str:
        reason = str(await self._engine.watch())
        said = vllm_exception_in(_own_log())
        return f"{reason} after {said}" if said else reason


def create_ranks(count: int, device: str, threads: int) -> list[Any]:
    """Ask Ray for the actors of a group of training ranks; on GPUs, on as few nodes as can be."""
    environment = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": device} | waiting()
    if device == "cpu":
        environment |= preloading()
    actor = ray.remote(
        num_cpus=0, concurrency_groups={"watch": 1}, runtime_env={"env_vars": environment}
    )(RankActor)
    if device == "cpu" or count == 0:
        return [actor.remote() for _ in range(count)]
    cards = placement_group([{"GPU": 1}] * count, strategy="PACK")
    bundles = [PlacementGroupSchedulingStrategy(cards, i) for i in range(count)]
    return [actor.options(num_gpus=1, scheduling_strategy=b).remote() for b in bundles]


def create_engine(spec: EngineSpec, device: str, seat: Seat | None = None) -> Any:
    """Ask Ray for the actor of one engine; seat: cards of ranks that it shares, where it does."""
    from plimsoll.rollout.vllm import environment as vllm_environment

    environment = vllm_environment(spec)
    if device == "cpu" and spec.rollout.engine == "transformers":
        environment |= preloading()
    actor = ray.remote(num_cpus=0, max_concurrency=10_000)(EngineActor)
    if seat is None:
        gpus = spec.rollout.tensor_parallel if device == "cuda" else 0
        placed = actor.options(num_gpus=gpus, runtime_env={"env_vars": environment})
    else:
        # Ray has given the cards to the ranks, and would not give them again.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(seat.cards)}
        placed = actor.options(
            num_gpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(seat.node_id, soft=False),
            runtime_env={"env_vars": environment | visible},
        )
    return placed.remote(spec)


def look_at(node_id: str, pids: Sequence[int]) -> NodeState | None:
    """A node as a task finds it there; None where none can be run soon."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(read_node)
    try:
        state: NodeState = ray.get(task.remote(pids), timeout=_LOOK_SECONDS)
    except RayError:  # the node is gone, or too busy
        return None
    return state


def members(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all actors have a process; they are called by their role and number."""
    try:
        hosts = ray.get([actor.host.remote() for actor in actors], timeout=timeout)
    except GetTimeoutError as error:
        raise PlimsollError(
            f"Ray could not start all processes in {timeout:.0f} s (cluster.start_timeout): "
            f"the cluster has {ray.cluster_resources()}. Ask for fewer ranks or engines, or "
            "wait for other jobs"
        ) from error
    except (RayActorError, OutOfMemoryError) as error:
        raise PlimsollError(f"Ray could not start a process: {why_dead(str(error))}") from error
    return [
        Member(f"{role} {i}", actor, host)
        for i, (actor, host) in enumerate(zip(actors, hosts, strict=True))
    ]


def _own_host() -> Host:
    context = ray.get_runtime_context()
    return Host(
        os.getpid(),
        ray.util.get_node_ip_address(),
        free_port(),
        _own_log(),
        context.get_node_id(),
        tuple(context.get_accelerator_ids()["GPU"]),
    )


def _own_log() -> str:
    return str(ray._private.worker.global_worker.get_err_file_path()).removesuffix(".err")


def _start_vllm(spec: EngineSpec) -> Any:
    from plimsoll.rollout.vllm import VllmEngine

    try:
        return VllmEngine(spec)
    except (RuntimeError, ValueError, OSError) as error:
        # What goes wrong in the process that vLLM starts is only in the log that they share.
        cause = (isinstance(error, RuntimeError) and vllm_exception_in(_own_log())) or str(error)
        what = f"rollout engine {spec.index}: vLLM could not start"
        why = f"{cause}\n  Settings: {_start_settings(spec)}"
        if tells_of_shortage(cause):
            where: Literal["device", "host"] = "device" if spec.device == "cuda" else "host"
            incident = Incident(where, f"vLLM could not start: {why}", "rollout")
            raise OutOfMemory(what, incident) from error
        raise PlimsollError(told(what, why, _own_log())) from error


def _start_settings(spec: EngineSpec) -> str:
    """The settings that decide whether vLLM can start, by the keys that the user knows."""
    memory = (
        f"rollout.memory_share: {spec.rollout.memory_share}"
        if spec.device == "cuda"
        else f"rollout.cpu_kv_cache_gib: {spec.rollout.cpu_kv_cache_gib}"
    )
    return (
        f"{memory}, rollout.max_sequences: {spec.rollout.max_sequences}, "
        f"rollout.tensor_parallel: {spec.rollout.tensor_parallel}, longest prompt and response "
        f"{spec.max_tokens} tokens, model {spec.model}"
    )
