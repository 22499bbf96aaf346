"""A cluster inside this process: one rank, and engines; no Ray. pdb works."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

from plimsoll.cluster.protocol import Group, Pending, Shortages
from plimsoll.config.cluster import Device
from plimsoll.machine.host import free_port
from plimsoll.machine.incident import OutOfMemory, Sighting, read_node
from plimsoll.machine.nvidia import own_cards
from plimsoll.records import Trajectory
from plimsoll.run.readings import Reading
from plimsoll.sampler.protocol import EngineSpec, Request, rollout_build
from plimsoll.trainer.memory import explain_shortage
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

R = TypeVar("R")


class LocalCluster:
    """A `Cluster` of one process."""

    streams = 1
    engines_near = True

    def __init__(
        self, specs: Sequence[EngineSpec], threads: int, device: Device, memory_halvings: int = 0
    ) -> None:
        self._before = read_node([os.getpid()])
        place = Place(0, 1, "127.0.0.1", free_port(), device, threads)
        self._device = place.torch_device
        self._readings: dict[str, Reading] = {}
        self._questions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._worker = Worker(place)
        self._engines = [rollout_build(spec.rollout).start(spec) for spec in specs]
        self.engines = len(self._engines)
        self.own_groups: Mapping[str, Group] = {}
        self.shortages = Shortages(memory_halvings)

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        """Call a method of `Worker` with the arguments of the only stream."""
        results = [self._do(task, *arguments) for arguments in per_stream]
        return Pending(lambda: results)

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` once; return a list of its one result."""
        return [self._do(task, *arguments)]

    def first(self, task: Callable[..., R], *arguments: object) -> R:
        """Call a method of `Worker` once."""
        return self._do(task, *arguments)

    def all_beside(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` once: no other call goes on. Return a list of its result."""
        return self.all(task, *arguments)

    def memory_error(self, stream: int, shard: int, error: OutOfMemory) -> OutOfMemory:
        """Return an error of the worker with the state of this machine."""
        what = f"this process (pid {os.getpid()}) ran out of {error.incident.where} memory"
        visible, node = own_cards(), platform.node()
        sighting = Sighting(
            process="local",
            node=node,
            card=visible[0].index if visible and self._device.type == "cuda" else None,
            before=self._before,
            after=read_node([os.getpid()]),
            nodes={"local": node},
            readings=self._readings,
        )
        return error.with_sighting(f"{what}\n  Why: {error.incident.why}", sighting)

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Leave a request to the thread that is in `wait_for`, and return its trajectories."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Trajectory]] = loop.create_future()

        def respond() -> None:
            if answer.done():  # the coroutine that asked has given up
                return
            with self._add_sighting("rollout"):
                engine = self._engines[episode % self.engines]
                trajectories = asyncio.run(engine.generate(request))
            loop.call_soon_threadsafe(_settle, answer, trajectories)

        self._questions.put(respond)
        return await answer

    def wait_for(self, future: Future[R]) -> R:
        """Return the result of work in another thread, whose requests this thread answers."""
        future.add_done_callback(lambda _: self._questions.put(lambda: None))
        while not future.done():
            self._questions.get()()  # Ctrl-C ends the wait, too
        return future.result()

    def busy_seconds(self) -> list[float]:
        """Return 0 for each engine, as none answers beside other calls."""
        return [0.0] * self.engines

    def let_engines_die(self) -> None:
        """Do nothing: an engine of this process dies with it."""

    def revive_engines(self) -> list[str]:
        """Return []: an engine of this process dies with it."""
        return []

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of `RolloutEngine` on every engine; return their results."""
        method = task.__name__
        with self._add_sighting("rollout"):
            return [asyncio.run(getattr(engine, method)(*arguments)) for engine in self._engines]

    def hand_over(
        self, gather: Callable[..., Any], given: tuple[object, ...], receive: Callable[..., R]
    ) -> R:
        """Pass what `gather` returns to all engines; return the first engine's answer."""
        answers: list[R] = self.engines_do(receive, self._do(gather, *given))
        return answers[0]

    def stream(
        self,
        send: Callable[..., Any],
        each: Sequence[tuple[object, ...]],
        receive: Callable[..., Any],
    ) -> None:
        """Send and receive in turn."""
        for arguments in each:
            self._do(send, *arguments)
            self.engines_do(receive)

    def reward_hosts(self) -> AbstractContextManager[None]:
        """Return None: this process computes rewards."""
        return nullcontext()

    def responses_per_request(self) -> int:
        """Return how many responses engines want in one request, if prompts suffice."""
        return self._engines[0].responses_per_request

    def read_memory(self) -> dict[str, Reading]:
        """Return the memory of this process, with peaks since the last call, as `local`."""
        self._readings = {"local": self._worker.read_memory()}
        return self._readings

    def _do(self, task: Callable[..., R], *arguments: object) -> R:
        with self._add_sighting(None):
            result: R = self._worker.do(task.__name__, *arguments)
            return result

    @contextmanager
    def _add_sighting(self, role: str | None) -> Iterator[None]:
        """Add the state of this machine to an OutOfMemory error from inside the block.

        `role` is the role whose model is in use; None for calls of the worker, whose errors name
        the role themselves.
        """
        try:
            with explain_shortage(self._device, lambda: role):
                yield
        except OutOfMemory as error:
            raise self.memory_error(0, 0, error) from error

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()


def _settle(answer: asyncio.Future[list[Trajectory]], trajectories: list[Trajectory]) -> None:
    if not answer.done():  # the coroutine that asked may have given up
        answer.set_result(trajectories)
