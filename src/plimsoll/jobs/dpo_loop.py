"""Direct preference optimisation and its family: learning from pairs; Rafailov et al. 2023.

    plimsoll dpo CONFIG.yaml

Each step draws pairs, scores them with the frozen reference (unless the loss is reference-free, or
it scored everything before), and takes one step on the loss of the config. The loss is a mean over
the pairs of the whole step, so no split into packs, micro-batches or ranks changes it; both
responses of a pair are in the same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.choice import PreferenceLoss, preference_loss
from plimsoll.algorithm.inputs import PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.cluster.start import start_cluster
from plimsoll.data.dataset import load_pairs
from plimsoll.engine.objectives.preference import PreferenceObjective, PreferenceStream
from plimsoll.engine.worker import StepResult
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.records import BatchCounts, Floats, Pair
from plimsoll.run.planned import Planned
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import Work, learn_from_data, open_work
from plimsoll.train.loading import load_measured, load_role
from plimsoll.train.measure import parts_of
from plimsoll.train.pairs import as_pair_metrics, pack_rows, prompts_of, samples_of
from plimsoll.train.precompute import ToScore
from plimsoll.train.reference import Reference, load_compared
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import Packs, log_probs, update

DpoWork = Work[DpoConfig, Pair]


@dataclass(frozen=True)
class HeldOut:
    """What stays the same from one evaluation to the next.

    lengths, reference: of each sequence (chosen, rejected, chosen, ...) its learned tokens, and its
    log-prob under the reference, None without one. prompts: of each pair.
    """

    packs: Packs
    lengths: Floats
    reference: Floats | None
    prompts: Sequence[int]


def run(spec: RunSpec[DpoConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    loss = preference_loss(spec.config.algorithm.loss)
    with open_work(spec, planned, load_pairs) as work:
        reference = None
        if loss.needs_reference:
            reference = load_compared(work, to_score(work), spec.config.reference_logprobs)
        else:
            with work.session.phase("load", work.cluster):
                load_role(work.cluster, work.spec, "actor")
        learn_from_data(
            work,
            lambda pair: pair.tokens,
            partial(learn, work, reference),
            partial(evaluate, work, loss, hold_out(work, reference)),
        )


def to_score(work: DpoWork) -> ToScore[Pair]:
    """Everything that the run will have the reference score."""
    return ToScore(
        work.batches_ahead,
        lambda pair: samples_of([pair]),
        lambda pairs: pack_rows(work.spec, pairs, work.cluster),
    )


def learn(
    work: DpoWork, reference: Reference | None, batch: Sequence[Pair], rate: float
) -> list[StepResult]:
    """Score the pairs with the reference, and take one optimizer step on all ranks."""
    cluster, algorithm = work.cluster, work.config.algorithm
    samples, packs = samples_of(batch), pack_rows(work.spec, batch, cluster)
    compared = None if reference is None else reference.log_probs(samples, packs, "score")
    streams = [
        [PreferenceStream(None if compared is None else compared[p.samples_S]) for p in own]
        for own in packs
    ]
    counts = BatchCounts.of(samples)
    objective = PreferenceObjective(algorithm.loss, algorithm.nll_weight)
    with work.session.phase("train_actor", cluster):
        return update("actor", cluster, packs, streams, counts, objective, rate)


def hold_out(work: DpoWork, reference: Reference | None) -> HeldOut | None:
    """Pack the held-out pairs and score them with the reference, which does not change; None where
    nothing is evaluated."""
    if work.spec.run.eval_every is None:
        return None
    samples, packs = samples_of(work.eval), pack_rows(work.spec, work.eval, work.cluster)
    lengths = np.array([sample.learned.sum() for sample in samples], dtype=np.float32)
    compared = None if reference is None else reference.log_probs(samples, packs, "eval")
    return HeldOut(packs, lengths, compared, prompts_of(work.eval))


def evaluate(work: DpoWork, loss: PreferenceLoss, held_out: HeldOut | None) -> dict[str, float]:
    """The loss on the held-out pairs and its metrics, with the accuracy's 95 % interval."""
    assert held_out is not None, "evaluated without run.eval_every"
    logprobs = log_probs("actor", held_out.packs, work.cluster)
    reference, prompts = held_out.reference, held_out.prompts
    return pair_metrics(work.config, loss, logprobs, held_out.lengths, reference, prompts)


def pair_metrics(
    config: DpoConfig,
    loss: PreferenceLoss,
    logprobs: Floats,
    lengths: Floats,
    reference: Floats | None,
    prompts: Sequence[int],
) -> dict[str, float]:
    """The loss on pairs and its metrics, with the accuracy's 95 % confidence interval; all as in
    `HeldOut`."""
    pairs = len(logprobs) // 2
    output = preference_objective(
        PreferenceLossInputs(_in_pairs(logprobs), _in_pairs(lengths), pairs),
        None if reference is None else _in_pairs(reference),
        loss.compute,
        config.algorithm.nll_weight,
    )
    return as_pair_metrics(output, prompts)


def _in_pairs(values: Floats) -> PairValues:
    return in_pairs(torch.from_numpy(values))


def measure(spec: RunSpec[DpoConfig], directory: Path) -> dict[str, float]:
    """The preference loss and its metrics, the accuracy with its interval; compared with the
    config's reference, or with the model that training began with."""
    loss = preference_loss(spec.config.algorithm.loss)
    loaded = load_held_out(spec, load_pairs)
    own, compared = [], []
    with closing(start_cluster(spec.cluster, ())) as cluster:
        load_measured(cluster, spec, "actor")
        if loss.needs_reference:
            load_measured(cluster, spec, "reference")
        for pairs in parts_of(loaded.items, cluster):
            packs = pack_rows(spec, pairs, cluster)
            own.append(log_probs("actor", packs, cluster))
            if loss.needs_reference:
                compared.append(log_probs("reference", packs, cluster))
    lengths = np.array([s.learned.sum() for s in samples_of(loaded.items)], dtype=np.float32)
    against = np.concatenate(compared) if compared else None
    prompts = prompts_of(loaded.items)
    metrics = pair_metrics(spec.config, loss, np.concatenate(own), lengths, against, prompts)
    return metrics | row_counts(loaded)
