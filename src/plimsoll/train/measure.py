"""Measure held-out rows, in training and without it."""

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

_ROWS_PER_RANK = 64
"""Rows that a rank gets at once: the progress bar moves after each such part."""


def score_in_parts(
    spec: RunSpec[Any],
    rows: Sequence[T],
    score: Callable[[Cluster, Sequence[T]], R],
    *roles: RoleName,
) -> list[R]:
    """Return what `score` gives for each part of the rows, on ranks with these roles alone."""
    results = []
    with closing(start_cluster(spec.cluster, ())) as cluster:
        for role in roles:
            load_measured(cluster, spec, role)
        size = _ROWS_PER_RANK * cluster.ranks
        with counting("rows", len(rows), sys.stdout) as advance:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                results.append(score(cluster, part))
                advance(len(part))
    return results


def sum_nll(spec: RunSpec[Any], cluster: Cluster, rows: Sequence[Sample]) -> float:
    """Return the sum of the negative log-likelihood (nats) of the rows' learned tokens."""
    packs = pack_rows(spec, rows, cluster)
    return sum(cluster.each(Worker.nll, [("actor", rank_packs) for rank_packs in packs]))


def measure_likelihood(spec: RunSpec[Any], load: LoadRows[Sample], name: str) -> dict[str, float]:
    """Return the held-out rows' mean negative log-likelihood (nats, as `name`) and perplexity."""
    loaded = load_held_out(spec, load)
    tokens = BatchCounts.of(loaded.items).tokens
    sums = score_in_parts(spec, loaded.items, lambda *part: sum_nll(spec, *part), "actor")
    mean = sum(sums) / tokens
    metrics = {name: mean, "perplexity": perplexity(mean), "tokens": tokens}
    return metrics | row_counts(loaded)


def perplexity(mean_nll: float) -> float:
    """Return the perplexity of a mean in nats; at most about 1e304, which a float still holds."""
    return exp(min(mean_nll, 700.0))


def output_metrics(output: LossOutput) -> dict[str, float]:
    """Return the loss and its metrics as numbers, by name."""
    return {"loss": float(output.loss)} | {n: float(x) for n, x in output.metrics.items()}


def pair_output_metrics(output: LossOutput, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the loss and its metrics, with the accuracy's 95 % interval over prompts."""
    metrics = output_metrics(output)
    if "accuracy" in metrics and output.right_P is not None:  # a user's own loss may lack either
        prompts = [pair.prompt for pair in pairs]
        low, high = share_interval(output.right_P.numpy(), prompts)
        metrics |= {"accuracy_low": low, "accuracy_high": high}
    return metrics
