"""How likely a model finds held-out rows, measured without training."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from plimsoll.algorithm.perplexity import perplexity
from plimsoll.cluster.start import start_cluster
from plimsoll.data.packing import pack
from plimsoll.engine.worker import Worker
from plimsoll.records import BatchCounts, Sample
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.loading import load_measured
from plimsoll.train.measure import parts_of
from plimsoll.train.run_data import LoadRows, load_held_out, row_counts


def measure_likelihood(spec: RunSpec[Any], load: LoadRows[Sample], name: str) -> dict[str, float]:
    """The mean negative log-likelihood (nats) and perplexity of the learned tokens. name: of the
    former."""
    loaded = load_held_out(spec, load)
    total, tokens = 0.0, BatchCounts.of(loaded.items).tokens
    with closing(start_cluster(spec.cluster, ())) as cluster:
        load_measured(cluster, spec, "actor")
        for rows in parts_of(loaded.items, cluster):
            packs = pack(rows, cluster.ranks, spec.workload.largest_pack(cluster.ranks))
            total += sum(cluster.each(Worker.nll, [("actor", own) for own in packs]))
    mean = total / tokens
    seen = {name: mean, "perplexity": perplexity(mean), "tokens": tokens}
    return seen | row_counts(loaded)
