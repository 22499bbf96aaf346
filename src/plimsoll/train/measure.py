"""Held-out rows measured, in training and without it: some at a time, and the metrics of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from math import exp
from typing import Any, TypeVar

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.interval import share_interval
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.engine.worker import Worker
from plimsoll.records import BatchCounts, Pair, Sample
from plimsoll.run.displays import counting
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.loading import load_measured
from plimsoll.train.run_data import LoadRows, load_held_out, row_counts
from plimsoll.train.update import pack_rows

T = TypeVar("T")
R = TypeVar("R")

_ROWS = 64
"""That a rank is given at once: so many are done between two signs of life."""


def in_parts(
    spec: RunSpec[Any],
    rows: Sequence[T],
    score: Callable[[Cluster, Sequence[T]], R],
    *roles: RoleName,
) -> list[R]:
    """What `score` gives of the rows, some at a time, on ranks with these roles alone, while a bar
    shows how far they are."""
    found = []
    with closing(start_cluster(spec.cluster, ())) as cluster:
        for role in roles:
            load_measured(cluster, spec, role)
        size = _ROWS * cluster.ranks
        with counting("rows", len(rows), sys.stdout) as advance:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                found.append(score(cluster, part))
                advance(len(part))
    return found


def summed_nll(spec: RunSpec[Any], cluster: Cluster, rows: Sequence[Sample]) -> float:
    """Of the actor's learned tokens; nats."""
    packs = pack_rows(spec, rows, cluster)
    return sum(cluster.each(Worker.nll, [("actor", own) for own in packs]))


def measure_likelihood(spec: RunSpec[Any], load: LoadRows[Sample], name: str) -> dict[str, float]:
    """The mean negative log-likelihood (nats) and perplexity of the held-out rows' learned tokens,
    without training. name: of the former."""
    loaded = load_held_out(spec, load)
    tokens = BatchCounts.of(loaded.items).tokens
    sums = in_parts(spec, loaded.items, lambda *part: summed_nll(spec, *part), "actor")
    mean = sum(sums) / tokens
    seen = {name: mean, "perplexity": perplexity(mean), "tokens": tokens}
    return seen | row_counts(loaded)


def perplexity(mean_nll: float) -> float:
    """Of a mean in nats; at most about 1e304, which a float still holds."""
    return exp(min(mean_nll, 700.0))


def as_metrics(output: LossOutput) -> dict[str, float]:
    """The loss and its metrics as numbers, by name."""
    return {"loss": float(output.loss)} | {n: float(x) for n, x in output.metrics.items()}


def as_pair_metrics(output: LossOutput, pairs: Sequence[Pair]) -> dict[str, float]:
    """The loss and its metrics, with the accuracy's 95 % confidence interval over prompts."""
    metrics = as_metrics(output)
    if "accuracy" in metrics and output.right_P is not None:  # a loss of one's own may lack either
        prompts = [pair.prompt for pair in pairs]
        low, high = share_interval(output.right_P.numpy(), prompts)
        metrics |= {"accuracy_low": low, "accuracy_high": high}
    return metrics
