"""Rows in packs on the ranks: one optimizer step of a role, and what is computed of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from plimsoll.cluster.protocol import Ranks
from plimsoll.data.packing import pack, pack_pairs
from plimsoll.engine.protocol import Objective
from plimsoll.engine.worker import StepResult, Worker
from plimsoll.records import BatchCounts, Floats, Pack, Pair, Row, samples_of
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec

S = TypeVar("S")

Packs = Sequence[Sequence[Pack]]
"""The packs of each rank."""


def pack_rows(spec: RunSpec[Any], rows: Sequence[Row], ranks: Ranks) -> Packs:
    """The packs of each rank, as the config's `batch` says; both responses of a pair are in the
    same."""
    work, n = spec.workload, ranks.ranks
    budget = work.largest_pack(n)
    if work.unit == "pair":
        pairs = cast(Sequence[Pair], rows)
        return pack_pairs(pairs, n, budget, share_prompts=work.shares_prompts)
    return pack(samples_of(rows), n, budget)


@dataclass(frozen=True)
class Step(Generic[S]):
    """What one optimizer step learns from. counts: over all ranks. stream: what goes with a pack
    besides its tokens; None: what the teacher has just made of it."""

    packs: Packs
    counts: BatchCounts
    objective: Objective[S]
    stream: Callable[[Pack], S] | None


def update(role: RoleName, ranks: Ranks, step: Step[S], rate: float) -> list[StepResult]:
    """Train on every rank's packs."""
    stream, rest = step.stream, (step.counts, step.objective, rate)
    return ranks.each(
        Worker.train,
        [
            (role, own, None if stream is None else [stream(pack) for pack in own], *rest)
            for own in step.packs
        ],
    )


def log_probs(role: RoleName, packs: Packs, ranks: Ranks) -> Floats:
    """The log-prob (nats) of the response of each sequence of a batch, in the batch's order."""
    found = ranks.each(Worker.sequence_log_probs, [(role, own) for own in packs])
    return in_batch_order(packs, found)


def in_batch_order(packs: Packs, found: Sequence[Sequence[Floats]]) -> Floats:
    """Of arrays with a number for each sequence of a pack: those of the batch, fillers left out."""
    both = [
        (pack.samples_S, values_S)
        for own, arrays in zip(packs, found, strict=True)
        for pack, values_S in zip(own, arrays, strict=True)
        if pack.loss_tokens  # not a filler
    ]
    places = np.concatenate([samples_S for samples_S, _ in both])
    return np.concatenate([values_S for _, values_S in both])[np.argsort(places)]
