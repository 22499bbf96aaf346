"""Direct preference optimisation and its family: learning from pairs; Rafailov et al. 2023.

    plimsoll dpo CONFIG.yaml

Each step draws pairs, scores them with the frozen reference (unless the loss is reference-free, or
it scored everything before), and takes one step on the loss of the config. The loss is a mean over
the pairs of the whole step, so no split into packs, micro-batches or ranks changes it; both
responses of a pair are in the same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from plimsoll.algorithm.choice import PreferenceLoss, preference_loss
from plimsoll.algorithm.inputs import PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.config.jobs import DpoConfig
from plimsoll.data.dataset import load_pairs
from plimsoll.engine.objectives.preference import PreferenceObjective, PreferenceStream
from plimsoll.engine.worker import StepResult
from plimsoll.recipes.from_data import Work, learn_from_data, open_work
from plimsoll.recipes.pairs import as_pair_metrics, pack_rows, prompts_of, samples_of
from plimsoll.recipes.precompute import ToScore
from plimsoll.recipes.reference import Reference, load_compared
from plimsoll.recipes.roles import load_actor
from plimsoll.recipes.update import Packs, log_probs, update
from plimsoll.records import BatchCounts, Floats, Pair

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


def run_dpo(config: DpoConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    loss = preference_loss(config.algorithm.loss)  # a wrong name or option ends the run right here
    with open_work("dpo", config, load_pairs) as work:
        reference = load_compared(work, to_score(work)) if loss.needs_reference else None
        if reference is None:
            load_actor(work)
        learn_from_data(
            work,
            config.batch.pairs,
            lambda pair: pair.tokens,
            partial(learn, work, reference),
            partial(evaluate, work, loss, hold_out(work, reference)),
        )


def to_score(work: DpoWork) -> ToScore[Pair]:
    """Everything that the run will have the reference score."""
    return ToScore(
        lambda: work.batches_ahead(work.config.batch.pairs),
        lambda pair: samples_of([pair]),
        lambda pairs: pack_rows(work.config, pairs, work.cluster),
    )


def learn(
    work: DpoWork, reference: Reference | None, batch: Sequence[Pair], rate: float
) -> list[StepResult]:
    """Score the pairs with the reference, and take one optimizer step on all ranks."""
    cluster, algorithm = work.cluster, work.config.algorithm
    samples, packs = samples_of(batch), pack_rows(work.config, batch, cluster)
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
    if work.config.run.eval_every is None:
        return None
    samples, packs = samples_of(work.eval), pack_rows(work.config, work.eval, work.cluster)
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
