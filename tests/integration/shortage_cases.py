"""Memory that runs out in training, by injection: where, and the ranks that go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from engine_cases import OBJECTIVE, RATES, Batch, Setting, policy_columns
from torch import Tensor, nn

from plimsoll.cluster.protocol import Pending, Shortages
from plimsoll.config.cluster import DecidedExchange
from plimsoll.data.packing import pack, pack_groups
from plimsoll.machine.incident import OutOfMemory
from plimsoll.train.update import OptimizerStep, update
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker

R = TypeVar("R")
Where = Literal["forward", "backward", "gradient"]


@dataclass(frozen=True)
class Fault:
    """rank, step: from 0. pass_: the number of the forward pass in the step, from 0. where: in the
    forward pass of a part, in its backward pass, or after the gradient of its first weight. part:
    the number of the module, of those with weights, from 0; taken modulo their number."""

    rank: int
    step: int
    pass_: int
    where: Where
    part: int


class TogetherRanks:
    """The ranks of a group, as each of them sees it: every rank is the controller, too."""

    def __init__(self, place: Place, worker: Worker, most: int) -> None:
        self._place, self.streams = place, place.ranks // place.shards
        self._worker = worker
        self.shortages = Shortages(most)

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        results: list[Any] = [None] * self._place.ranks
        stream = self._place.rank // self._place.shards
        own = getattr(self._worker, task.__name__)(*[*per_stream][stream])
        dist.all_gather_object(results, own)
        return Pending(lambda: results, self._place.shards)

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        return self.call(task, [arguments] * self.streams).result()

    def memory_error(self, stream: int, shard: int, error: OutOfMemory) -> OutOfMemory:
        return error


@contextmanager
def full_card(module: nn.Module, fault: Fault) -> Iterator[None]:
    """During the block the fault happens in the module, once."""
    parts = [part for part in module.modules() if part._parameters]
    part, passes, done = parts[fault.part % len(parts)], [0], list[bool]()

    def fail(*_: object) -> None:
        if not done:
            done.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    def after_forward(_: nn.Module, inputs: object, output: Any) -> None:
        if passes[0] != fault.pass_ + 1:
            return
        if fault.where == "forward":
            fail()
        if fault.where == "backward" and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(fail)

    def count(*_: object) -> None:
        passes[0] += 1

    def after_gradient(_: Tensor) -> None:
        if passes[0] == fault.pass_ + 1:
            fail()

    hooks = [module.register_forward_pre_hook(count), part.register_forward_hook(after_forward)]
    weight = next(p for p in part.parameters())
    if fault.where == "gradient" and weight.requires_grad:
        hooks.append(weight.register_post_accumulate_grad_hook(after_gradient))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Survived:
    """results: of each step. limits, shortages: how the micro-batches shrank."""

    results: list[UpdateResult]
    limits: list[int | None] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


def train_through(
    place: Place,
    model: Path,
    setting: Setting,
    batches: Sequence[Batch],
    faults: Sequence[Fault],
    out: Path,
    groups: Sequence[int] | None = None,
    most: int = 3,
    shards: int = 1,
    exchange: DecidedExchange = "heads",
) -> Survived:
    """Train a policy on the batches, one step each, through the faults, and save the model.

    groups: samples that may share their first tokens in a pack. shards: ranks that share a pack.
    """
    place = replace(place, shards=shards, exchange=exchange)
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    ranks = TogetherRanks(place, worker, most)
    results, limits, before = [], [], []
    for number, (batch, rate) in enumerate(zip(batches, RATES, strict=False)):
        budget = place.shards * setting.micro_batch_tokens
        packs = (
            pack(batch.samples, ranks.streams, budget)
            if groups is None
            else pack_groups(batch.samples, groups, ranks.streams, budget)
        )
        step = OptimizerStep(packs, batch.counts, OBJECTIVE, policy_columns(batch))
        mine = [f for f in faults if f.step == number and f.rank == place.rank]
        if mine:
            with full_card(worker._engines["actor"].module, mine[0]):
                own = update("actor", ranks, step, rate)
        else:
            own = update("actor", ranks, step, rate)
        results.append(own[place.rank // place.shards])
        limits.append(ranks.shortages.limits.get("actor"))
        before += [shortage.before for shortage in ranks.shortages.take_unreported()]
    worker.save_model("actor", out)
    return Survived(results, limits, before)
