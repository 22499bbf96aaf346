"""A frozen model measured on held-out rows that say what is right: likelihood,
preferences, scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from plimsoll.algorithm.choice import preference_loss, reward_loss, unpaired_loss
from plimsoll.algorithm.perplexity import perplexity
from plimsoll.algorithm.unpaired import kl_baseline
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.engine import FrozenRole
from plimsoll.config.jobs import (
    DataJobConfig,
    DistillConfig,
    DpoConfig,
    KtoConfig,
    PrmConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.data.dataset import load_pairs, load_responses, load_samples, load_steps
from plimsoll.data.mismatched import mismatched
from plimsoll.data.packing import pack
from plimsoll.engine.worker import Worker
from plimsoll.memory.price.work import largest_pack
from plimsoll.recipes.kto import response_metrics
from plimsoll.recipes.pairs import pack_rows, prompts_of, samples_of
from plimsoll.recipes.preference import pair_metrics
from plimsoll.recipes.process_reward import process_metrics, score_steps
from plimsoll.recipes.reward_model import (
    load_scored_pairs,
    score_metrics,
    score_pairs,
)
from plimsoll.recipes.roles import compared_role
from plimsoll.recipes.run_data import load_held_out, row_counts
from plimsoll.recipes.update import log_probs
from plimsoll.records import BatchCounts, Floats
from plimsoll.run.counter import counting

T = TypeVar("T")

_ROWS = 64
"""That a rank is given at once: so many are done between two signs of life."""


def measure_likelihood(config: SftConfig | DistillConfig) -> dict[str, float]:
    """The mean negative log-likelihood (nats) and perplexity of the learned tokens, by the names
    that the job's evaluation has for them."""
    learned = config.algorithm.learned_tokens if isinstance(config, SftConfig) else "assistant"
    loaded = load_held_out(config, partial(load_samples, learned=learned))
    total, tokens = 0.0, BatchCounts.of(loaded.items).tokens
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_policy, "actor", _frozen(config), 1.0)
        for rows in _parts(loaded.items, cluster):
            packs = pack(rows, cluster.ranks, largest_pack(config, cluster.ranks))
            total += sum(cluster.each(Worker.nll, [("actor", own) for own in packs]))
    mean = total / tokens
    name = "loss" if isinstance(config, SftConfig) else "nll"
    seen = {name: mean, "perplexity": perplexity(mean), "tokens": tokens}
    return seen | row_counts(loaded)


def measure_pairs(config: DpoConfig) -> dict[str, float]:
    """The preference loss and its metrics, the accuracy with its interval; compared with the
    config's reference, or with the model that training began with."""
    loss = preference_loss(config.algorithm.loss)
    loaded = load_held_out(config, load_pairs)
    own, compared = [], []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_policy, "actor", _frozen(config), 1.0)
        if loss.needs_reference:
            cluster.all(
                Worker.load_policy, "reference", compared_role(config.reference, config.actor), 1.0
            )
        for pairs in _parts(loaded.items, cluster):
            packs = pack_rows(config, pairs, cluster)
            own.append(log_probs("actor", packs, cluster))
            if loss.needs_reference:
                compared.append(log_probs("reference", packs, cluster))
    lengths = np.array([s.learned.sum() for s in samples_of(loaded.items)], dtype=np.float32)
    against = np.concatenate(compared) if compared else None
    prompts = prompts_of(loaded.items)
    metrics = pair_metrics(config, loss, np.concatenate(own), lengths, against, prompts)
    return metrics | row_counts(loaded)


def measure_responses(config: KtoConfig) -> dict[str, float]:
    """The loss on labelled responses and its metrics, the accuracy with its interval; compared as
    pairs are, with the KL of all rows together."""
    unpaired_loss(config.algorithm.loss)  # a wrong name or option ends it right here
    loaded = load_held_out(config, load_responses)
    samples = [row.sample for row in loaded.items]
    others = mismatched(samples, config.data.max_tokens)
    found = []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_policy, "actor", _frozen(config), 1.0)
        cluster.all(
            Worker.load_policy, "reference", compared_role(config.reference, config.actor), 1.0
        )
        for part in _parts(list(zip(samples, others, strict=True)), cluster):
            packs = pack(list(chain(*part)), cluster.ranks, largest_pack(config, cluster.ranks))
            own = log_probs("actor", packs, cluster)
            found.append(own - log_probs("reference", packs, cluster))
    logratios = np.concatenate(found)  # of a row, and of its prompt with another response
    desirable_S = np.array([row.desirable for row in loaded.items])
    kl = kl_baseline(torch.from_numpy(logratios[1::2]))
    prompts = [row.prompt for row in loaded.items]
    return response_metrics(config, logratios[::2], desirable_S, prompts, kl) | row_counts(loaded)


def measure_scores(config: RmConfig, output_png: Path) -> dict[str, float]:
    """A reward model's loss on pairs and its metrics, the accuracy with its interval; draws the
    calibration."""
    reward_loss(config.algorithm.loss)  # a wrong name or option ends it right here
    loaded = load_held_out(config, load_scored_pairs)
    scores = []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_value, "actor", _frozen(config), config.run.seed)
        for pairs in _parts(loaded.items, cluster):
            scores.append(score_pairs(pack_rows(config, pairs, cluster), cluster))
    metrics = score_metrics(config, np.concatenate(scores), loaded.items, output_png)
    return metrics | row_counts(loaded)


def measure_steps(config: PrmConfig, output_png: Path) -> dict[str, float]:
    """A process reward model's loss on steps and its metrics, and those of whole solutions; draws
    the calibration."""
    loaded = load_held_out(config, load_steps)
    scores: list[Floats] = []
    with closing(start_cluster(config.cluster, ())) as cluster:
        cluster.all(Worker.load_value, "actor", _frozen(config), config.run.seed)
        for rows in _parts(loaded.items, cluster):
            scores += score_steps(config, rows, cluster)
    return process_metrics(scores, loaded.items, output_png) | row_counts(loaded)


def _frozen(config: DataJobConfig) -> FrozenRole:
    """The model that is measured, divided as the actor is where its weights are."""
    return FrozenRole(model=config.actor.model, stage=3 if config.actor.zero.stage == 3 else 0)


def _parts(rows: Sequence[T], cluster: Cluster) -> Iterator[Sequence[T]]:
    """The rows, some at a time, while a bar shows how far they are."""
    size = _ROWS * cluster.ranks
    with counting("rows", len(rows), sys.stdout) as advance:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part
            advance(len(part))
