"""Everything in this process: one rank, transformers rollouts, no Ray. pdb works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from plimsoll.config.cluster import ClusterConfig
from plimsoll.engine.process_group import Place, choose_device, free_port
from plimsoll.engine.worker import Worker
from plimsoll.records import Trajectory
from plimsoll.rollout.protocol import EngineSpec, Request
from plimsoll.rollout.transformers import TransformersEngine
from plimsoll.run.readings import Reading

R = TypeVar("R")


class LocalCluster:
    """A `Cluster` of one process."""

    ranks = 1

    def __init__(self, config: ClusterConfig, specs: Sequence[EngineSpec], threads: int) -> None:
        device = choose_device(config.device)
        place = Place(0, 1, 0, "127.0.0.1", free_port(), device, threads)
        self._worker = Worker(place)
        self._engines = [TransformersEngine(spec) for spec in specs]
        self.engines = len(self._engines)
        self.critics = self

    def each(self, task: Callable[..., R], arguments: Sequence[tuple[object, ...]]) -> list[R]:
        return [task(self._worker, *own) for own in arguments]

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        return [task(self._worker, *arguments)]

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Trajectory]]]:
        for i, request in enumerate(requests):
            yield i, asyncio.run(self._engines[i % self.engines].generate(request))

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        method = task.__name__
        return [asyncio.run(getattr(engine, method)(*arguments)) for engine in self._engines]

    def hand_over(
        self,
        gather: Callable[..., R | None],
        arguments: tuple[object, ...],
        receive: Callable[..., Any],
    ) -> None:
        self.engines_do(receive, gather(self._worker, *arguments))

    def responses_per_request(self) -> int:
        return self._engines[0].responses_per_request

    def read_memory(self) -> dict[str, Reading]:
        return {"local": self._worker.read_memory()}

    def close(self) -> None:
        self._worker.stop()
