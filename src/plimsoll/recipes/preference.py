"""Direct preference optimisation and its family: learning from pairs; Rafailov et al. 2023.

    plimsoll dpo CONFIG.yaml

Each step draws pairs, scores them with the frozen reference (unless the loss is reference-free),
and takes one step on the loss of the config. The loss is a mean over the pairs of the whole step,
so no split into packs, micro-batches or ranks changes it; both responses of a pair are in the
same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from plimsoll.algorithm.choice import PreferenceLoss, preference_loss
from plimsoll.algorithm.inputs import PairValues, PreferenceLossInputs
from plimsoll.algorithm.interval import wilson_interval
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.jobs import DpoConfig
from plimsoll.data.dataset import load_pairs
from plimsoll.data.order import DataOrder
from plimsoll.data.packing import pack_pairs
from plimsoll.engine.preference import PreferenceObjective
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.streams import PreferenceStream
from plimsoll.engine.worker import Role, StepResult, Worker
from plimsoll.recipes.roles import load_reference
from plimsoll.recipes.session import (
    Session,
    load_data,
    open_session,
    step_metrics,
)
from plimsoll.records import Floats, Pack, Pair

Packs = list[list[Pack]]
"""One list of packs per rank."""


@dataclass(frozen=True)
class PreferenceData:
    """The pairs to learn from, and those held out."""

    train: tuple[Pair, ...]
    eval: tuple[Pair, ...]


@dataclass(frozen=True)
class HeldOut:
    """What stays the same from one evaluation to the next.

    lengths, reference: of each sequence (chosen, rejected, chosen, ...) its learned tokens, and its
    log-prob under the reference, None without one.
    """

    packs: Packs
    lengths: Floats
    reference: Floats | None


def run_dpo(config: DpoConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    loss = preference_loss(config.algorithm.loss)  # a wrong name or option ends the run right here
    with open_session("dpo", config) as session:
        with session.phase("data"):
            data = PreferenceData(*load_data(session, load_pairs))
        with session.phase("load"):
            cluster = start_cluster(config.cluster, ())
        with closing(cluster):
            session.check_nodes(cluster)
            with session.phase("load", cluster):
                load_roles(cluster, config, loss)
                session.restore(cluster, ["actor"])
            train(session, config, data, cluster, loss)
            session.save_model(cluster)


def load_roles(cluster: Cluster, config: DpoConfig, loss: PreferenceLoss) -> None:
    """Load the actor and, where the loss compares with one, the reference on all ranks."""
    cluster.all(Worker.load_policy, "actor", config.actor, 1.0, config.run.seed)
    if loss.needs_reference:
        load_reference(cluster, config.reference, config.actor, 1.0)


def train(
    session: Session,
    config: DpoConfig,
    data: PreferenceData,
    cluster: Cluster,
    loss: PreferenceLoss,
) -> None:
    """The loop: draw, pack, score, step, report; save and evaluate when due."""
    order = DataOrder(len(data.train), config.run.seed, config.data.shuffle)
    state = session.state
    if config.run.eval_every is not None:
        with session.phase("eval", cluster):
            held_out = hold_out(data.eval, config, cluster, loss)
    while state.step < config.run.steps:
        step = state.step + 1
        rows = order.indices(state.data_position, config.batch.pairs)
        batch = [data.train[row] for row in rows]
        packs = pack_pairs(batch, cluster.ranks, config.batch.micro_batch_tokens)
        reference = None
        if loss.needs_reference:
            with session.phase("score", cluster):
                reference = log_probs("reference", packs, cluster)
        rate = learning_rate(config.actor.optimizer, state.step, config.run.steps)
        with session.phase("train_actor", cluster):
            results = train_actor(packs, reference, len(batch), config, cluster, rate)
        state = session.advance(state, len(rows))
        metrics = step_metrics(results, rate) | {"epoch": state.data_position / len(data.train)}
        if session.due(config.run.eval_every, step):
            with session.phase("eval", cluster):
                metrics |= evaluate(held_out, config, cluster, loss)
        session.report(step, metrics, sum(pair.tokens for pair in batch))
        session.save_when_due(cluster, ["actor"], state)
        session.stop_if_asked(step)


def log_probs(role: Role, packs: Packs, cluster: Cluster) -> Floats:
    """The log-prob (nats) of the response of each sequence of a batch, in the batch's order."""
    found = cluster.each(Worker.sequence_log_probs, [(role, own) for own in packs])
    scored = [
        (pack.samples_S, logprobs_S)
        for own, arrays in zip(packs, found, strict=True)
        for pack, logprobs_S in zip(own, arrays, strict=True)
        if pack.learned  # not a filler
    ]
    places = np.concatenate([samples_S for samples_S, _ in scored])
    return np.concatenate([logprobs_S for _, logprobs_S in scored])[np.argsort(places)]


def train_actor(
    packs: Packs,
    reference: Floats | None,
    pairs: int,
    config: DpoConfig,
    cluster: Cluster,
    rate: float,
) -> list[StepResult]:
    """One optimizer step on all ranks.

    reference: its log-prob of each response, in the batch's order; None for a reference-free loss.
    """
    objective = PreferenceObjective(config.algorithm.loss, config.algorithm.nll_weight)
    streams = [
        [PreferenceStream(None if reference is None else reference[p.samples_S]) for p in own]
        for own in packs
    ]
    arguments = zip(packs, streams, strict=True)
    return cluster.each(
        Worker.train_preference, [(*own, pairs, objective, rate) for own in arguments]
    )


def hold_out(
    pairs: Sequence[Pair], config: DpoConfig, cluster: Cluster, loss: PreferenceLoss
) -> HeldOut:
    """Pack the held-out pairs and score them with the reference, which does not change."""
    packs = pack_pairs(pairs, cluster.ranks, config.batch.micro_batch_tokens)
    learned = [[int(p.chosen.learned.sum()), int(p.rejected.learned.sum())] for p in pairs]
    lengths = np.array(learned, dtype=np.float32).ravel()
    reference = log_probs("reference", packs, cluster) if loss.needs_reference else None
    return HeldOut(packs, lengths, reference)


def evaluate(
    held_out: HeldOut, config: DpoConfig, cluster: Cluster, loss: PreferenceLoss
) -> dict[str, float]:
    """The loss on the held-out pairs and its metrics, as `eval/<name>`, with the accuracy's 95 %
    confidence interval."""
    logprobs = log_probs("actor", held_out.packs, cluster)
    reference = held_out.reference
    pairs = len(logprobs) // 2
    output = preference_objective(
        PreferenceLossInputs(_in_pairs(logprobs), _in_pairs(held_out.lengths), pairs),
        None if reference is None else _in_pairs(reference),
        loss.compute,
        config.algorithm.nll_weight,
    )
    metrics = {"loss": float(output.loss)} | {n: float(x) for n, x in output.metrics.items()}
    if "accuracy" in metrics:  # a loss of one's own may not tell it
        low, high = wilson_interval(metrics["accuracy"], pairs)
        metrics |= {"accuracy_low": low, "accuracy_high": high}
    return {f"eval/{name}": value for name, value in metrics.items()}


def _in_pairs(values: Floats) -> PairValues:
    return in_pairs(torch.from_numpy(values))
