"""Pack rows for the ranks, take an optimizer step of a role, and compute log-probs of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from plimsoll.cluster.protocol import Ranks
from plimsoll.data.packing import pack, pack_pairs
from plimsoll.engine.protocol import Objective
from plimsoll.engine.worker import UpdateResult, Worker
from plimsoll.records import BatchCounts, Floats, Pack, Pair, Row, samples_of
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec

S = TypeVar("S")

Packs = Sequence[Sequence[Pack]]
"""The packs of each rank."""


def pack_rows(spec: RunSpec[Any], rows: Sequence[Row], ranks: Ranks) -> Packs:
    """Return the rows in packs for each rank; the config's `batch` limits the size of a pack.

    Both responses of a pair are in the same pack.
    """
    workload = spec.workload
    budget = workload.largest_pack(ranks.ranks)
    if workload.unit == "pair":
        pairs = cast(Sequence[Pair], rows)
        return pack_pairs(pairs, ranks.ranks, budget, share_prompts=workload.shares_prompts)
    return pack(samples_of(rows), ranks.ranks, budget)


@dataclass(frozen=True)
class OptimizerStep(Generic[S]):
    """The data and the objective of one optimizer step."""

    packs: Packs
    counts: BatchCounts
    """The counts over all ranks, by which the loss is normalised."""
    objective: Objective[S]
    stream: Callable[[Pack], S] | None
    """Returns what the objective needs beside a pack, such as labels. None: the ranks have it
    already, made by the teacher just before.
    """


def update(role: RoleName, ranks: Ranks, step: OptimizerStep[S], rate: float) -> list[UpdateResult]:
    """Take one optimizer step of a role at learning rate `rate`; return each rank's result."""
    stream, rest = step.stream, (step.counts, step.objective, rate)
    return ranks.each(
        Worker.train,
        [
            (role, packs, None if stream is None else [stream(pack) for pack in packs], *rest)
            for packs in step.packs
        ],
    )


def log_probs(role: RoleName, packs: Packs, ranks: Ranks) -> Floats:
    """Return the log-prob (nats) of each sequence's response, in the order of the batch; [S]."""
    by_rank = ranks.each(Worker.sequence_log_probs, [(role, rank_packs) for rank_packs in packs])
    return in_batch_order(packs, by_rank)


def in_batch_order(packs: Packs, by_rank: Sequence[Sequence[Floats]]) -> Floats:
    """Return one array of the sequences' values in the order of the batch; fillers are left out.

    `by_rank` has, for each rank, an array for each of its packs.
    """
    pairs = [
        (pack.samples_S, values_S)
        for rank_packs, arrays in zip(packs, by_rank, strict=True)
        for pack, values_S in zip(rank_packs, arrays, strict=True)
        if pack.loss_tokens  # not a filler
    ]
    places = np.concatenate([samples_S for samples_S, _ in pairs])
    return np.concatenate([values_S for _, values_S in pairs])[np.argsort(places)]
