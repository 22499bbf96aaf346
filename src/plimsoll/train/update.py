"""Pack rows for the ranks, take an optimizer step of a role, and compute log-probs of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np

from plimsoll.cluster.protocol import Group
from plimsoll.data.packing import pack, pack_pairs
from plimsoll.machine.incident import OutOfMemory
from plimsoll.records import (
    BatchColumns,
    BatchCounts,
    ColumnLayout,
    Floats,
    Pack,
    PackColumns,
    Pair,
    Row,
    cut,
    from_packed,
    samples_of,
)
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.trainer.protocol import Objective
from plimsoll.trainer.worker import Abandoned, UpdateResult, Worker

Packs = Sequence[Sequence[Pack]]
"""The packs of each rank."""


def pack_rows(spec: RunSpec[Any], rows: Sequence[Row], group: Group) -> Packs:
    """Return the rows in packs for each rank; the config's `batch` limits the size of a pack.

    Both responses of a pair are in the same pack.
    """
    workload = spec.workload
    budget = workload.largest_pack(group.streams)
    if workload.unit == "pair":
        pairs = cast(Sequence[Pair], rows)
        return pack_pairs(pairs, group.streams, budget, share_prompts=workload.shares_prompts)
    return pack(samples_of(rows), group.streams, budget)


@dataclass(frozen=True)
class OptimizerStep:
    """The data and the objective of one optimizer step."""

    packs: Packs
    counts: BatchCounts
    """The counts over all ranks, by which the loss is normalised."""
    objective: Objective
    columns: BatchColumns | RoleName
    """What the objective reads beside the tokens, such as labels; or the name of a teacher, whose
    outputs on the packs the ranks have already (`teach`).
    """
    unit: int = 1
    """The sequences of a pack that stay together: 2 for pairs, else 1."""


def update(role: RoleName, group: Group, step: OptimizerStep, rate: float) -> list[UpdateResult]:
    """Take one optimizer step of a role at learning rate `rate`; return each stream's result.

    If memory runs out, the step is done anew with smaller micro-batches, as far as
    `cluster.memory_halvings` allows. Its gradient is the same but for rounding, because losses are
    divided by the counts of the step. The limit that was found holds for all later steps; while
    there is one, the results have it as a metric.
    """
    shortages = group.shortages
    if not shortages.most:
        return group.call(Worker.train, _arguments(role, step, step.packs, rate)).result()
    packs = shortages.split(role, step.packs, step.unit)
    while True:
        if isinstance(step.columns, RoleName) and packs is not step.packs:
            teach(step.columns, packs, group)
        pending = group.call(Worker.try_to_train, _arguments(role, step, packs, rate))
        outcomes = pending.by_stream()
        results = [first for first, *_ in outcomes if isinstance(first, UpdateResult)]
        if results:
            return _with_limit(results, role, shortages.limits.get(role))
        smallest = min(_failed_packs(packs, outcomes), key=lambda failed: failed[1].tokens)
        (stream, shard), failed_pack, error = smallest
        error = group.memory_error(stream, shard, error)
        shortages.add(role, error, failed_pack, step.unit)
        packs = shortages.split(role, packs, step.unit)


def _arguments(
    role: RoleName, step: OptimizerStep, packs: Packs, rate: float
) -> Iterator[tuple[object, ...]]:
    """Yield the arguments of `Worker.train` for each rank; columns are cut as they are sent."""
    columns, rest = step.columns, (step.counts, step.objective, rate)

    def columns_of(rank_packs: Sequence[Pack]) -> list[PackColumns] | None:
        if isinstance(columns, RoleName):
            return None
        return [cut(columns, pack) for pack in rank_packs]

    return ((role, rank_packs, columns_of(rank_packs), *rest) for rank_packs in packs)


def _failed_packs(
    packs: Packs, outcomes: Sequence[Sequence[UpdateResult | Abandoned]]
) -> Iterator[tuple[tuple[int, int], Pack, OutOfMemory]]:
    """Yield (stream, shard), micro-batch and error for each rank that ran out of memory."""
    for stream, of_shards in enumerate(outcomes):
        for shard, outcome in enumerate(of_shards):
            if isinstance(outcome, Abandoned) and outcome.error is not None:
                yield (stream, shard), packs[stream][outcome.pack], outcome.error


def _with_limit(
    results: list[UpdateResult], role: RoleName, limit: int | None
) -> list[UpdateResult]:
    """Return the results with the limit of a micro-batch's tokens as a metric, if there is one."""
    if limit is None:
        return results
    first, metric = results[0], {f"{role}/micro_batch_tokens": float(limit)}
    return [replace(first, metrics=first.metrics | metric), *results[1:]]


def teach(teacher: RoleName, packs: Packs, group: Group) -> None:
    """Run a teacher on packs; each rank keeps the outputs for the student's next step on them."""
    group.call(Worker.teacher_forward, [(teacher, rank_packs) for rank_packs in packs]).result()


def log_probs(role: RoleName, packs: Packs, group: Group) -> Floats:
    """Return the log-prob (nats) of each sequence's response, in the order of the batch; [S]."""
    task = Worker.sequence_log_probs
    return np.concatenate(score_packs(group, task, role, packs, layout="S"))


def score_packs(
    group: Group,
    task: Callable[..., list[Floats]],
    role: RoleName,
    packs: Packs,
    *options: object,
    layout: ColumnLayout = "L",
) -> list[Floats]:
    """Run a method of `Worker` that scores, each pack on its rank; return an array per sample.

    The method gets the role, the rank's packs and the `options`. `layout` is that of its scores.
    """
    by_rank = group.call(task, [(role, rank_packs, *options) for rank_packs in packs]).result()
    return from_packed(chain(*packs), chain(*by_rank), layout)
