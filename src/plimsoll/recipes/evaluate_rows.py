"""A frozen model measured on held-out rows that say what is right: likelihood, pairs, scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from math import exp
from typing import TypeVar

import numpy as np

from plimsoll.algorithm.choice import preference_loss
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.engine import FrozenRole
from plimsoll.config.jobs import DistillConfig, DpoConfig, RmConfig, SftConfig
from plimsoll.data.dataset import Loaded, load_pairs, load_samples
from plimsoll.data.packing import pack, pack_pairs
from plimsoll.engine.worker import Worker
from plimsoll.model.value import at_ends
from plimsoll.recipes.preference import pair_metrics, samples_of
from plimsoll.recipes.reference import log_probs
from plimsoll.recipes.reward_model import load_scored_pairs, margins_of, score_metrics
from plimsoll.recipes.run_data import load_held_out
from plimsoll.recipes.update import Packs, in_batch_order
from plimsoll.records import Pair
from plimsoll.run.counter import counting

T = TypeVar("T")

_ROWS = 64
"""That a rank is given at once: so many are done between two signs of life."""


def measure_likelihood(config: SftConfig | DistillConfig, model: str) -> dict[str, float]:
    """The mean negative log-likelihood (nats) and perplexity of the learned tokens."""
    learned = config.algorithm.learned_tokens if isinstance(config, SftConfig) else "assistant"
    loaded = load_held_out(config, partial(load_samples, learned=learned))
    total, tokens = 0.0, sum(int(row.learned.sum()) for row in loaded.items)
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_policy, "actor", _frozen(config, model), 1.0)
        for rows in _parts(loaded, cluster):
            packs = pack(rows, cluster.ranks, config.batch.micro_batch_tokens)
            total += sum(cluster.each(Worker.nll, [("actor", own) for own in packs]))
    mean = total / tokens
    seen = {"loss": mean, "perplexity": exp(min(mean, 700.0)), "tokens": tokens}
    return seen | _rows_of(loaded)


def measure_pairs(config: DpoConfig, model: str) -> dict[str, float]:
    """The preference loss and its metrics, the accuracy with its interval; compared with the
    config's reference, or with the model that training began with."""
    loss = preference_loss(config.algorithm.loss)
    loaded = load_held_out(config, load_pairs)
    reference = config.reference or FrozenRole(model=config.actor.model)
    own, compared = [], []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_policy, "actor", _frozen(config, model), 1.0)
        if loss.needs_reference:
            cluster.all(Worker.load_policy, "reference", reference, 1.0)
        for pairs in _parts(loaded, cluster):
            packs = _pack_pairs(config, pairs, cluster)
            own.append(log_probs("actor", packs, cluster))
            if loss.needs_reference:
                compared.append(log_probs("reference", packs, cluster))
    lengths = np.array([s.learned.sum() for s in samples_of(loaded.items)], dtype=np.float32)
    against = np.concatenate(compared) if compared else None
    return pair_metrics(config, loss, np.concatenate(own), lengths, against) | _rows_of(loaded)


def measure_scores(config: RmConfig, model: str) -> dict[str, float]:
    """A reward model's loss on pairs and its metrics, the accuracy with its interval."""
    loaded = load_held_out(config, load_scored_pairs)
    scores = []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_value, "actor", _frozen(config, model), config.run.seed)
        for pairs in _parts(loaded, cluster):
            packs = _pack_pairs(config, pairs, cluster)
            found = cluster.each(Worker.values, [("actor", own, at_ends) for own in packs])
            scores.append(in_batch_order(packs, found))
    return score_metrics(config, np.concatenate(scores), margins_of(loaded.items)) | _rows_of(
        loaded
    )


def _pack_pairs(config: DpoConfig | RmConfig, pairs: Sequence[Pair], cluster: Cluster) -> Packs:
    batch = config.batch
    return pack_pairs(
        pairs, cluster.ranks, batch.micro_batch_tokens, share_prompts=batch.share_prompts
    )


def _frozen(config: SftConfig | DistillConfig | DpoConfig | RmConfig, path: str) -> FrozenRole:
    """The model that is measured, divided as the actor is where its weights are."""
    own = {"path": path, "gradient_checkpointing": False}
    model = config.actor.model.model_copy(update=own)
    return FrozenRole(model=model, stage=3 if config.actor.zero.stage == 3 else 0)


def _parts(loaded: Loaded[T], cluster: Cluster) -> Iterator[Sequence[T]]:
    """The rows, some at a time, while a bar shows how far they are."""
    rows, size = loaded.items, _ROWS * cluster.ranks
    with counting("rows", len(rows), sys.stdout) as advance:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part
            advance(len(part))


def _rows_of(loaded: Loaded[T]) -> dict[str, float]:
    return {"rows": len(loaded.items), "skipped_rows": len(loaded.bad_rows)}
