"""Training ranks for tests: real processes, started once, that run a function for every call."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

import cpuinfo  # type: ignore[import-untyped]
from torch import multiprocessing

from plimsoll.config.cluster import Device
from plimsoll.machine.host import free_port
from plimsoll.trainer.process_group import Place, leave

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 300.0
"""Seconds for one call: DeepSpeed's CPU Adam is compiled at its first use on a machine."""


class RankFailed(Exception):
    """A rank raised, or its process ended, or gave no answer; with the end of what it wrote."""


@dataclass(frozen=True)
class _Rank:
    number: int
    process: Any
    pipe: Connection
    log: Path


class RankProcesses:
    """N processes on this machine in one process group; they start with the first `run`. On cuda it
    can be one: NCCL has no two ranks on one card.

    A rank that fails may leave the others inside a collective, so all are killed then, and the
    next `run` starts new ones.
    """

    def __init__(self, ranks: int, device: Device = "cpu") -> None:
        self._count = ranks
        self._device = device
        self._ranks: list[_Rank] = []
        self._logs = tempfile.TemporaryDirectory()

    def run(
        self,
        function: Callable[Concatenate[Place, P], R],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> list[R]:
        """The results of `function(place, *arguments)` on every rank, in the order of the ranks.

        The function is found by its name in its module, as pickle does. Raises RankFailed.
        """
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                rank.pipe.send((function, arguments, options))
            return _answers(self._ranks)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End all processes at once."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
        self._ranks.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for number in range(self._count):
            ours, theirs = context.Pipe()
            log = Path(self._logs.name) / f"rank-{number}.log"
            place = Place(number, self._count, "127.0.0.1", port, self._device, threads=1)
            process = context.Process(target=_serve, args=(place, theirs, log), daemon=True)
            with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # for DeepSpeed's CPU Adam
                process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._ranks.append(_Rank(number, process, ours, log))


def _answers(ranks: Sequence[_Rank]) -> list[Any]:
    """One result from every rank; the first that ends without one ends the waiting."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + _PATIENCE
    while len(results) < len(ranks):
        late = [rank for rank in ranks if rank.number not in results]
        ready = wait([rank.pipe for rank in late], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"no answer in {_PATIENCE:.0f} s\n{_last_words(late)}")
        for rank in late:
            if rank.pipe in ready:
                try:
                    results[rank.number] = rank.pipe.recv()
                except EOFError:
                    # The others' words too: one may have died of another's death, and first.
                    raise RankFailed(f"rank {rank.number} ended\n{_last_words(late)}") from None
    return [results[rank.number] for rank in ranks]


def _last_words(ranks: Sequence[_Rank]) -> str:
    return "\n".join(f"rank {r.number} wrote last:\n{r.log.read_text()[-4000:]}" for r in ranks)


def _serve(place: Place, pipe: Connection, log: Path) -> None:
    """The loop of a rank.

    Consumes: calls from the pipe. Waits for: the next call, and inside a call the other ranks.
    Unblocked by: `RankProcesses.run`, which makes the same call on all ranks. Produces: one
    result per call. Shut down by being killed or by the end of the pipe. An error in a call is
    the end of the process: its traceback is in the log.
    """
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # DeepSpeed's Adam for the CPU asks for each of its instances, and each answer takes a second.
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return leave()
        # What calls import, and what DeepSpeed keeps of each engine: to go through all of it, as
        # DeepSpeed does many times for each engine, soon takes longer than most calls.
        gc.freeze()
        pipe.send(function(place, *arguments, **options))
        gc.collect()  # the engines of the last call: modules and their hooks are cycles
