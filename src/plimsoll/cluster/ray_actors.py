"""The Ray actors: each hosts one training rank, or one engine that samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from plimsoll.cluster.exit_reason import death_reason, start_error
from plimsoll.cluster.heartbeats import Pulse, read_pulse
from plimsoll.cluster.placement import NodeCards, order_by_node, shared_placement, spread
from plimsoll.engine.memory import explain_shortage
from plimsoll.engine.process_group import Place, free_port
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError
from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.heap import preload_settings
from plimsoll.machine.host import thread_wait_settings
from plimsoll.machine.incident import NodeState, read_node
from plimsoll.machine.nvidia import card_order, visible_cards
from plimsoll.machine.stacks import write_stacks_when_asked
from plimsoll.rollout.protocol import EngineSpec, RolloutEngine, rollout_build
from plimsoll.run.output import tell

R = TypeVar("R")

_LOOK_SECONDS = 20.0
"""How long a call of a function on a node may take."""
_SOON_SECONDS = 30.0
"""How long processes usually take to start if their cards are free."""
_OWN_CARDS = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Settings with which Ray writes a process's cards to CUDA_VISIBLE_DEVICES, and leaves the variable
alone for a process without cards. They override the user's environment."""


@dataclass(frozen=True)
class Host:
    """The process and node of an actor.

    Attributes:
        pid: The id of the actor's process.
        node: The address of its node.
        port: A free port on its node.
        log: The log of its process, without suffix; see `exit_reason`.
        node_id: Ray's id of its node.
        cards: The GPUs that Ray gave it; for an engine that shares the ranks' GPUs, these. They
            have the names in CUDA_VISIBLE_DEVICES: numbers, or UUIDs if the node's variable has
            UUIDs.
    """

    pid: int
    node: str
    port: int
    log: str
    node_id: str
    cards: tuple[str, ...]

    def card(self, node: NodeState) -> int | None:
        """Return the number of the actor's first card on its node; None on CPU, or if unknown."""
        return next((c.index for c in visible_cards(node.cards, ",".join(self.cards))), None)


@dataclass(frozen=True)
class Member:
    """An actor with its place; messages name it "training rank 1 (pid 4711 on node 10.0.0.1)"."""

    role: str
    actor: Any
    host: Host

    @property
    def name(self) -> str:
        """The actor's name in messages."""
        return f"{self.role} (pid {self.host.pid} on node {self.host.node})"


class RankActor:
    """The actor that hosts one `Worker`, in the command's directory.

    Consumes: calls of the controller, in order. Waits for: other ranks, inside collectives.
    Unblocked by: the controller making the same call on every rank. Produces: results. `watch` runs
    beside them and never returns: its reference fails when the process dies. `sign` runs beside
    them, too.
    """

    def __init__(self, directory: str) -> None:
        _work_in(directory)
        write_stacks_when_asked()

    def host(self) -> Host:
        """Return the actor's process and node; works before the process group is made."""
        return _own_host()

    def start(self, place: Place) -> None:
        """Make the worker, which joins the process group of all ranks."""
        self._worker = Worker(place)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker; return its result."""
        return self._worker.do(method, *arguments)

    def look(self, pids: Sequence[int]) -> NodeState:
        """Return the memory state of this node; `pids` are the run's processes here."""
        return read_node(pids)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Wait until the process dies."""
        threading.Event().wait()

    @ray.method(concurrency_group="signs")  # type: ignore[untyped-decorator]
    def sign(self) -> Pulse:
        """Return this process's pulse; a separate thread answers, also during `call`."""
        return read_pulse()


class EngineActor:
    """The actor that hosts one `RolloutEngine`, in the command's directory; many calls run at once.

    Consumes: requests and weights from the controller. Waits for: its engine. Unblocked by: its
    engine's progress. Produces: trajectories. `watch` returns or fails only when the engine died.
    `sign` runs in a separate event loop, because an engine may block the first one.
    """

    def __init__(self, spec: EngineSpec, directory: str) -> None:
        _work_in(directory)
        write_stacks_when_asked()
        self._spec = spec

    async def host(self) -> Host:
        """Return the actor's process and node, and the cards that its engine uses."""
        host = _own_host()
        if host.cards or self._spec.device == "cpu":
            return host
        return replace(host, cards=tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))

    async def start(self) -> int:
        """Load the model; return the engine's `responses_per_request`."""
        self._engine: Any = _start_engine(self._spec)
        return int(self._engine.responses_per_request)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine; return its result."""
        with explain_shortage(torch.device(self._spec.device), lambda: "rollout"):
            return await getattr(self._engine, method)(*arguments)

    async def watch(self) -> str:
        """Wait until the engine dies; return the reason."""
        reason = str(await self._engine.watch())
        logged = rollout_build(self._spec.rollout).logged_error(_own_log())
        return f"{reason} after {logged}" if logged else reason

    @ray.method(concurrency_group="signs")  # type: ignore[untyped-decorator]
    async def sign(self) -> Pulse:
        """Return this process's pulse, after the engine's own processes have answered."""
        await self._engine.answer()
        return read_pulse()


def create_ranks(count: int, device: str, threads: int, nodes: Sequence[str]) -> list[Any]:
    """Ask Ray for the actors of a group of training ranks; return them before they have started.

    On CPU the actors are spread over `nodes` (Ray's ids). On GPUs each actor gets a GPU, on as few
    nodes as possible.
    """
    environment = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": device}
    environment |= thread_wait_settings() | card_order()
    environment |= preload_settings() if device == "cpu" else _OWN_CARDS
    actor = ray.remote(
        num_cpus=0,
        concurrency_groups={"watch": 1, "signs": 1},
        runtime_env={"env_vars": environment},
    )(RankActor)
    if device == "cpu" or count == 0:
        placed_actors = (
            actor.options(scheduling_strategy=_on_node(s.node_id)) for s in spread(nodes, count)
        )
        return [placed.remote(os.getcwd()) for placed in placed_actors]
    cards = placement_group([{"GPU": 1}] * count, strategy="PACK")
    bundles = [PlacementGroupSchedulingStrategy(cards, i) for i in range(count)]
    return [actor.options(num_gpus=1, scheduling_strategy=b).remote(os.getcwd()) for b in bundles]


def create_engines(specs: Sequence[EngineSpec], device: str, nodes: Sequence[str]) -> list[Any]:
    """Ask Ray for one actor per engine: on CPU spread over the nodes, else on separate GPUs."""
    placement = spread(nodes, len(specs)) if device == "cpu" else [None] * len(specs)
    return [
        _create_engine(spec, device, place) for spec, place in zip(specs, placement, strict=True)
    ]


def share_cards(specs: Sequence[EngineSpec], device: str, ranks: Sequence[Member]) -> list[Any]:
    """Ask Ray for one actor per engine, on the cards that Ray has already given to the ranks."""
    rank_cards = [NodeCards(member.host.node_id, member.host.cards) for member in ranks]
    placement = shared_placement(rank_cards, len(specs), specs[0].rollout.degrees)
    return [
        _create_engine(spec, device, place) for spec, place in zip(specs, placement, strict=True)
    ]


def _create_engine(spec: EngineSpec, device: str, place: NodeCards | None) -> Any:
    """Ask Ray for the actor of one engine; without a place it gets separate GPUs."""
    environment = dict(rollout_build(spec.rollout).environment(spec))
    environment |= _OWN_CARDS if device == "cuda" else preload_settings()
    actor = ray.remote(num_cpus=0, max_concurrency=10_000, concurrency_groups={"signs": 1})(
        EngineActor
    )
    if place is None:
        gpus = spec.rollout.parts
        placed_actor = actor.options(num_gpus=gpus, runtime_env={"env_vars": environment})
    else:
        # Ray has given the cards to the ranks, and would not give them again.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(place.cards)}
        placed_actor = actor.options(
            num_gpus=0,
            scheduling_strategy=_on_node(place.node_id),
            runtime_env={"env_vars": environment | visible},
        )
    return placed_actor.remote(spec, os.getcwd())


def _on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def call_on_node(
    node_id: str, function: Callable[[Sequence[int]], R], pids: Sequence[int]
) -> R | None:
    """Call a function with `pids` on a node; return its result, or None if the node is too slow."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(pids)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=_on_node(node_id))(function)
    try:
        result: R = ray.get(task.remote(pids), timeout=_LOOK_SECONDS)
    except RayError:  # the node is gone, or too busy
        return None
    return result


def members(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all actors have a process; return them, named by their role and number."""
    try:
        hosts = _hosts(role, [actor.host.remote() for actor in actors], timeout)
    except GetTimeoutError as error:
        raise PlimsollError(
            f"Ray could not start the {role}s in {timeout:.0f} s (cluster.start_timeout): "
            f"{_free_gpus()}. Ask for fewer ranks or engines, or wait for other jobs"
        ) from error
    except RayError as error:
        raise PlimsollError(f"Ray could not start a process: {death_reason(str(error))}") from error
    return [
        Member(f"{role} {i}", actor, host)
        for i, (actor, host) in enumerate(zip(actors, hosts, strict=True))
    ]


def rank_members(role: str, actors: Sequence[Any], timeout: float) -> list[Member]:
    """Wait until all ranks have a process; return them, numbered node by node."""
    unordered = members(role, actors, timeout)
    order = order_by_node([member.host.node_id for member in unordered])
    return [replace(unordered[i], role=f"{role} {number}") for number, i in enumerate(order)]


def _hosts(role: str, references: Sequence[Any], timeout: float) -> list[Host]:
    """Return the actors' hosts; print a note if they wait long for cards."""
    soon = min(timeout, _SOON_SECONDS)
    with suppress(GetTimeoutError):
        hosts: list[Host] = ray.get(references, timeout=soon)
        return hosts
    if ray.cluster_resources().get("GPU", 0) > 0:
        tell(f"waiting for Ray to start the {role}s: {_free_gpus()}")
    hosts = ray.get(references, timeout=timeout - soon)
    return hosts


def _free_gpus() -> str:
    free, total = (r.get("GPU", 0) for r in (ray.available_resources(), ray.cluster_resources()))
    if total == 0:
        return "they need no GPUs, so its nodes are slow"
    return f"{free:.0f} of the cluster's {total:.0f} GPUs are free"


def _work_in(directory: str) -> None:
    """Change to the command's directory, so that relative paths mean the same here.

    In a joined cluster, processes begin in the directory of `ray start`. A node without the
    command's directory keeps that; only absolute paths work there.
    """
    with suppress(OSError):
        os.chdir(directory)


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


def _start_engine(spec: EngineSpec) -> RolloutEngine:
    kills, build = oom_kills(), rollout_build(spec.rollout)
    try:
        return build.start(spec)
    except (RuntimeError, ValueError, OSError) as error:
        # An error in a process that the engine starts is only in the log that they share.
        reason = (isinstance(error, RuntimeError) and build.logged_error(_own_log())) or str(error)
        raise start_error(spec, reason, oom_kills() != kills, _own_log()) from error
