"""The Ray actors: each hosts one training rank, or one engine that samples.

This module imports no torch, so that actors soon say where they are. `prepare` imports what takes
seconds, in all of them at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from plimsoll.cluster.heartbeats import Pulse, read_pulse, takes_whole_model
from plimsoll.errors import WeightSyncError
from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.faults import fault_point, name_process
from plimsoll.machine.host import free_port, network_interface
from plimsoll.machine.incident import NodeState, read_node
from plimsoll.machine.nvidia import visible_cards
from plimsoll.machine.processes import write_stacks_when_asked

if TYPE_CHECKING:
    from plimsoll.sampler.protocol import EngineSpec, RolloutEngine
    from plimsoll.trainer.process_group import Place


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
    beside them and never returns: its reference fails when the process dies. `sign` and
    `call_beside` run beside them, too.
    """

    def __init__(self, directory: str) -> None:
        prepare_process(directory)

    def host(self) -> Host:
        """Return the actor's process and node; works before `prepare`."""
        return _own_host()

    def prepare(self) -> None:
        """Import what training needs."""
        import plimsoll.trainer.worker  # noqa: F401

    def start(self, place: Place) -> None:
        """Make the worker, which joins the process group of all ranks."""
        from plimsoll.trainer.worker import Worker

        name_process("rank", place.rank)
        self._call = ""
        self._worker = Worker(place)
        fault_point("rank.start")

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker; return its result."""
        self._call = method
        return self._worker.do(method, *arguments)

    def call_each(self, method: str, each: Sequence[tuple[object, ...]]) -> None:
        """Call a method of the worker with one set of arguments after the other.

        The error of a transfer is raised at the end: other ranks are in the same collectives.
        """
        errors = list[WeightSyncError | RuntimeError]()
        for arguments in each:
            try:
                self.call(method, *arguments)
            except (WeightSyncError, RuntimeError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def look(self, pids: Sequence[int]) -> NodeState:
        """Return the memory state of this node; `pids` are the run's processes here."""
        return read_node(pids)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Wait until the process dies."""
        threading.Event().wait()

    @ray.method(concurrency_group="signs")  # type: ignore[untyped-decorator]
    def call_beside(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker, also during `call`; return its result."""
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="signs")  # type: ignore[untyped-decorator]
    def sign(self) -> Pulse:
        """Return this process's pulse; a separate thread answers, also during `call`."""
        call, worker = self._call, self._worker
        return read_pulse(worker.ends, spins=worker.waits_for_card and not takes_whole_model(call))


class EngineActor:
    """The actor that hosts one `RolloutEngine`, in the command's directory; many calls run at once.

    Consumes: requests and weights from the controller. Waits for: its engine. Unblocked by: its
    engine's progress. Produces: trajectories. `watch` returns or fails only when the engine died.
    `sign` runs in a separate event loop, because an engine may block the first one.
    """

    def __init__(self, directory: str, shared_cards: tuple[str, ...]) -> None:
        prepare_process(directory)
        self._shared_cards = shared_cards

    async def host(self) -> Host:
        """Return the actor's process and node, and the cards that its engine uses."""
        return _own_host(self._shared_cards)

    async def prepare(self, spec: EngineSpec) -> None:
        """Import what the engine needs; use no card yet."""
        from torch import device

        from plimsoll.sampler.protocol import rollout_build
        from plimsoll.trainer.memory import explain_shortage

        name_process("engine", spec.index)
        self._spec = spec
        self._explain_shortage = partial(explain_shortage, device(spec.device), lambda: "rollout")
        self._build = rollout_build(spec.rollout)
        self._build.prepare()

    async def start(self, prepared: None) -> int:
        """Load the model; return the engine's `responses_per_request`.

        `prepared` is the result of `prepare`: Ray begins calls in any order, but for their
        arguments. Raises PlimsollError with the engine's own reason if it cannot start.
        """
        from plimsoll.cluster.exit_reason import start_error

        kills, log = oom_kills(), _own_log()
        try:
            fault_point("engine.start")
            self._engine: RolloutEngine = self._build.start(self._spec)
        except (RuntimeError, ValueError, OSError) as error:
            # An error in a process that the engine starts is only in the log that they share.
            logged = isinstance(error, RuntimeError) and self._build.logged_error(log)
            killed = oom_kills() != kills
            raise start_error(self._spec, logged or str(error), killed, log) from error
        return self._engine.responses_per_request

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine; return its result."""
        with self._explain_shortage():
            return await getattr(self._engine, method)(*arguments)

    async def call_each(self, method: str, each: Sequence[tuple[object, ...]]) -> None:
        """Call a method of the engine with one set of arguments after the other."""
        for arguments in each:
            await self.call(method, *arguments)

    async def watch(self) -> str:
        """Wait until the engine dies; return the reason."""
        reason = await self._engine.watch()
        logged = self._build.logged_error(_own_log())
        return f"{reason} after {logged}" if logged else reason

    @ray.method(concurrency_group="signs")  # type: ignore[untyped-decorator]
    async def sign(self) -> Pulse:
        """Return this process's pulse, after the engine's own processes have answered."""
        await self._engine.answer()
        return read_pulse()


def prepare_process(directory: str) -> None:
    """Change to the command's directory, so that relative paths mean the same here.

    In a joined cluster, processes begin in the directory of `ray start`. A node without the
    command's directory keeps that; only absolute paths work there. Have gloo and NCCL use the
    network of the node's address, unless the node's settings name another.
    """
    with suppress(OSError):
        os.chdir(directory)
    for name, value in network_interface(ray.util.get_node_ip_address()).items():
        os.environ.setdefault(name, value)
    write_stacks_when_asked()


def _own_host(shared_cards: tuple[str, ...] = ()) -> Host:
    context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
    cards = shared_cards or tuple(context.get_accelerator_ids()["GPU"])
    return Host(os.getpid(), address, free_port(), _own_log(), context.get_node_id(), cards)


def _own_log() -> str:
    return str(ray._private.worker.global_worker.get_err_file_path()).removesuffix(".err")
