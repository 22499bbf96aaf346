"""Supervised fine-tuning: learn the assistant's turns of given conversations.

    plimsoll sft CONFIG.yaml

The loss is the mean negative log-likelihood over the learned tokens of the whole step, so no
split into packs, micro-batches or ranks changes it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from math import exp

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.jobs import SftConfig
from plimsoll.data.dataset import load_samples
from plimsoll.data.order import DataOrder
from plimsoll.data.packing import pack
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.worker import Worker
from plimsoll.recipes.session import (
    Session,
    load_data,
    open_session,
    step_metrics,
)
from plimsoll.records import BatchCounts, Sample


@dataclass(frozen=True)
class SftData:
    """The samples to learn from, and those held out."""

    train: tuple[Sample, ...]
    eval: tuple[Sample, ...]


def run_sft(config: SftConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    with open_session("sft", config) as session:
        with session.phase("data"):
            data = SftData(*load_data(session, load_samples))
        with session.phase("load"):
            cluster = start_cluster(config.cluster, ())
        with closing(cluster):
            session.check_nodes(cluster)
            with session.phase("load", cluster):
                cluster.all(Worker.load_policy, "actor", config.actor, 1.0, config.run.seed)
                session.restore(cluster, ["actor"])
            train(session, config, data, cluster)
            session.save_model(cluster)


def train(session: Session, config: SftConfig, data: SftData, cluster: Cluster) -> None:
    """The loop: draw, pack, step, report; save and evaluate when due."""
    order = DataOrder(len(data.train), config.run.seed, config.data.shuffle)
    state = session.state
    while state.step < config.run.steps:
        step = state.step + 1
        rows = order.indices(state.data_position, config.batch.sequences)
        batch = [data.train[row] for row in rows]
        packs = pack(batch, cluster.ranks, config.batch.micro_batch_tokens)
        counts = BatchCounts(sum(int(s.learned.sum()) for s in batch), len(batch))
        rate = learning_rate(config.actor.optimizer, state.step, config.run.steps)
        with session.phase("train_actor", cluster):
            results = cluster.each(Worker.train_sft, [(own, counts, rate) for own in packs])
        state = session.advance(state, len(rows))
        metrics = step_metrics(results, rate) | {"epoch": state.data_position / len(data.train)}
        if session.due(config.run.eval_every, step):
            with session.phase("eval", cluster):
                metrics |= evaluate(config, data, cluster)
        session.report(step, metrics, sum(len(s.tokens) for s in batch))
        session.save_when_due(cluster, ["actor"], state)
        session.stop_if_asked(step)


def evaluate(config: SftConfig, data: SftData, cluster: Cluster) -> dict[str, float]:
    """Mean negative log-likelihood (nats) and perplexity per learned token of the held-out rows."""
    packs = pack(data.eval, cluster.ranks, config.batch.micro_batch_tokens)
    total = sum(cluster.each(Worker.nll, [("actor", own) for own in packs]))
    mean = total / sum(int(s.learned.sum()) for s in data.eval)
    return {"eval/loss": mean, "eval/perplexity": exp(min(mean, 700.0))}
