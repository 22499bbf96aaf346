"""Measure a model on held-out rows, during training or without it, and draw its calibration.

The drawings are reliability diagrams: Guo et al. 2017, https://arxiv.org/abs/1706.04599, figure 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from math import exp
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.algorithm.figures import Calibration, share_interval
from plimsoll.algorithm.inputs import LossOutput
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.records import BatchCounts, Pair, Sample
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.chart import draw_calibration
from plimsoll.run.displays import counting
from plimsoll.run.files import write_whole
from plimsoll.train.loading import load_measured
from plimsoll.train.run_data import LoadRows, load_held_out, row_counts
from plimsoll.train.update import pack_rows
from plimsoll.trainer.worker import Worker

T = TypeVar("T")
R = TypeVar("R")

_ROWS_PER_RANK = 64
"""Rows per rank in one part; the progress bar moves after each part."""


def score_in_parts(
    spec: RunSpec[Any],
    rows: Sequence[T],
    score: Callable[[Cluster, Sequence[T]], R],
    *roles: RoleName,
) -> list[R]:
    """Return a list with the result of `score` for each part of the rows, in order.

    The ranks are started for this call alone, with `roles` loaded (by default the one that a run
    trains and writes), and ended afterwards.
    """
    results = []
    with closing(start_cluster(spec.cluster, ())) as cluster:
        for role in roles or (spec.sender.name,):
            load_measured(cluster, spec, role)
        size = _ROWS_PER_RANK * cluster.streams
        with counting("rows", len(rows), sys.stdout) as advance:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                results.append(score(cluster, part))
                advance(len(part))
    return results


def sum_nll(spec: RunSpec[Any], cluster: Cluster, rows: Sequence[Sample]) -> float:
    """Return the sum of the negative log-likelihood (nats) of the rows' learned tokens."""
    packs, name = pack_rows(spec, rows, cluster), spec.sender.name
    return sum(cluster.call(Worker.nll, [(name, rank_packs) for rank_packs in packs]).result())


def measure_likelihood(spec: RunSpec[Any], load: LoadRows[Sample], name: str) -> dict[str, float]:
    """Return metrics of the held-out rows: likelihood, perplexity, and counts.

    The mean negative log-likelihood (nats per learned token) is under the key `name`.
    """
    loaded = load_held_out(spec, load)
    tokens = BatchCounts.of(loaded.items).tokens
    sums = score_in_parts(spec, loaded.items, lambda *part: sum_nll(spec, *part))
    mean = sum(sums) / tokens
    metrics = {name: mean, "perplexity": perplexity(mean), "tokens": tokens}
    return metrics | row_counts(loaded)


def perplexity(mean_nll: float) -> float:
    """Return exp(mean_nll), where `mean_nll` is in nats, limited to about 1e304 (no overflow)."""
    return exp(min(mean_nll, 700.0))


def output_metrics(output: LossOutput) -> dict[str, float]:
    """Return the loss and its metrics as numbers, by name."""
    return {"loss": float(output.loss)} | {n: float(x) for n, x in output.metrics.items()}


def pair_output_metrics(output: LossOutput, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the loss and its metrics by name, with a 95 % confidence interval of the accuracy.

    The interval takes into account which pairs share a prompt. It is left out if the loss has no
    accuracy.
    """
    metrics = output_metrics(output)
    if "accuracy" in metrics and output.right_P is not None:  # a user's own loss may lack either
        prompts = [pair.prompt for pair in pairs]
        low, high = share_interval(output.right_P.numpy(), prompts)
        metrics |= {"accuracy_low": low, "accuracy_high": high}
    return metrics


PICTURE = "eval-calibration.svg"
"""The file name of the calibration diagram of an evaluation without training."""


def show_calibration(calibration: Calibration, of_what: str, output_svg: Path) -> dict[str, float]:
    """Draw a calibration as a diagram, and return {"calibration_error": its error}.

    The diagram has the mean prediction of each bin on the x axis, the observed share on the y axis,
    and the count as a note. `of_what` begins the title. Raises PlimsollError if the file cannot be
    written.
    """
    predicted, observed = calibration.predicted_K.tolist(), calibration.observed_K.tolist()
    counts = [f"{count:,}" for count in calibration.counts_K.tolist()]
    points = [*zip(predicted, observed, strict=True)]
    title = f"{of_what}; calibration error {calibration.error:.3f}"
    write_whole(output_svg, draw_calibration(title, points, counts))
    return {"calibration_error": calibration.error}
