"""Kahneman-Tversky optimisation: learning from single responses that are good or bad.

    plimsoll kto CONFIG.yaml

Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306. Each step draws labelled responses,
measures how far the policy is from the reference on the step's prompts with other responses, and
takes one step on the loss of the config. That KL is of the whole step, before its update, and the
loss a mean over its responses: no split into packs, micro-batches or ranks changes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.choice import unpaired_loss
from plimsoll.algorithm.inputs import LabelCounts, UnpairedLossInputs
from plimsoll.algorithm.separation import separation_effect, separation_interval, share_ahead
from plimsoll.algorithm.unpaired import kl_baseline
from plimsoll.cluster.start import start_cluster
from plimsoll.data.dataset import load_responses
from plimsoll.data.mismatched import mismatched
from plimsoll.data.packing import pack
from plimsoll.engine.objectives.unpaired import UnpairedObjective, UnpairedStream
from plimsoll.engine.worker import StepResult
from plimsoll.errors import DataError
from plimsoll.jobs.kto import KtoConfig
from plimsoll.records import BatchCounts, Bools, Floats, LabelledResponse, Sample
from plimsoll.run.planned import Planned
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import Work, learn_from_data, open_work
from plimsoll.train.loading import load_measured
from plimsoll.train.measure import parts_of
from plimsoll.train.precompute import ToScore
from plimsoll.train.reference import Reference, ScoringPhase, load_compared
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import Packs, as_metrics, log_probs, update

KtoWork = Work[KtoConfig, LabelledResponse]


@dataclass(frozen=True)
class Scored:
    """Samples in packs, and their log-probs under the reference."""

    packs: Packs
    reference_S: Floats


@dataclass(frozen=True)
class Responses:
    """Labelled responses with their prompts, and the prompts with other responses. prompts: of each
    response the number of its prompt."""

    desirable_S: Bools
    prompts: Sequence[int]
    matched: Scored
    mismatched: Scored


def run(spec: RunSpec[KtoConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    unpaired_loss(spec.config.algorithm.loss)
    with open_work(spec, planned, load_responses) as work:
        check_labels(work.train)
        reference = load_compared(work, to_score(work), spec.config.reference_logprobs)
        held_out = None
        if spec.run.eval_every is not None:
            held_out = score(work, reference, work.eval, "eval")
        learn_from_data(
            work,
            lambda row: len(row.sample.tokens),
            partial(learn, work, reference),
            partial(evaluate, work, held_out),
        )


def check_labels(rows: Sequence[LabelledResponse]) -> None:
    """DataError where all rows have the same label: there is nothing to tell apart."""
    labels = {row.desirable for row in rows}
    if len(labels) == 1:
        word = "desirable" if labels == {True} else "undesirable"
        every = "The only row" if len(rows) == 1 else f"Every one of the {len(rows):,} rows"
        raise DataError(
            f"{every} to learn from is labelled {word}, and KTO learns "
            f"what tells the two apart. Check data.train.label and data.train.limit; desirable "
            f"responses alone are learned by `plimsoll sft`."
        )


def to_score(work: KtoWork) -> ToScore[Sample]:
    """Everything that the run will have the reference score."""
    return ToScore(
        lambda: chain.from_iterable(both(work, rows) for rows in work.batches_ahead()),
        lambda sample: [sample],
        partial(pack_samples, work),
    )


def both(work: KtoWork, batch: Sequence[LabelledResponse]) -> tuple[list[Sample], list[Sample]]:
    """The rows' samples, and their prompts with other responses."""
    samples = [row.sample for row in batch]
    return samples, mismatched(samples, work.config.data.max_tokens)


def pack_samples(work: KtoWork, samples: Sequence[Sample]) -> Packs:
    ranks = work.cluster.ranks
    return pack(samples, ranks, work.spec.workload.largest_pack(ranks))


def score(
    work: KtoWork, reference: Reference, batch: Sequence[LabelledResponse], phase: ScoringPhase
) -> Responses:
    """Pack the rows, and score them with the reference."""
    scored = []
    for samples in both(work, batch):
        packs = pack_samples(work, samples)
        scored.append(Scored(packs, reference.log_probs(samples, packs, phase)))
    desirable_S = np.array([row.desirable for row in batch])
    return Responses(desirable_S, [row.prompt for row in batch], *scored)


def learn(
    work: KtoWork, reference: Reference, batch: Sequence[LabelledResponse], rate: float
) -> list[StepResult]:
    """Score the rows, measure the KL, and take one optimizer step on all ranks."""
    cluster, session = work.cluster, work.session
    responses = score(work, reference, batch, "score")
    with session.phase("score", cluster):
        kl = measured_kl(work, responses)
    counts = BatchCounts.of([row.sample for row in batch])
    objective = UnpairedObjective(work.config.algorithm.loss, kl, counts_of(responses.desirable_S))
    packs, streams = responses.matched.packs, streams_of(responses)
    with session.phase("train_actor", cluster):
        return update("actor", cluster, packs, streams, counts, objective, rate)


def measured_kl(work: KtoWork, responses: Responses) -> float:
    """By how much the policy has moved from the reference (`kl_baseline`)."""
    other = responses.mismatched
    policy_S = log_probs("actor", other.packs, work.cluster)
    return kl_baseline(torch.from_numpy(policy_S - other.reference_S))


def streams_of(responses: Responses) -> list[list[UnpairedStream]]:
    """What each pack of labelled responses carries besides its tokens; a filler nothing."""
    reference_S, desirable_S = responses.matched.reference_S, responses.desirable_S
    places = [[p.samples_S[p.samples_S >= 0] for p in own] for own in responses.matched.packs]
    return [[UnpairedStream(reference_S[at], desirable_S[at]) for at in own] for own in places]


def evaluate(work: KtoWork, held_out: Responses | None) -> dict[str, float]:
    """The loss on the held-out rows and its metrics, with the KL of all of them together, and the
    accuracy."""
    assert held_out is not None, "evaluated without run.eval_every"
    kl = measured_kl(work, held_out)
    policy_S = log_probs("actor", held_out.matched.packs, work.cluster)
    logratios_S = policy_S - held_out.matched.reference_S
    desirable_S, prompts = held_out.desirable_S, held_out.prompts
    return response_metrics(work.config, logratios_S, desirable_S, prompts, kl)


def response_metrics(
    config: KtoConfig,
    logratios_S: Floats,
    desirable_S: Bools,
    prompts: Sequence[int],
    kl: float,
) -> dict[str, float]:
    """The loss on labelled responses and its metrics; where both labels are among them, the
    desirable ones' `share_ahead` as the accuracy, with its 95 % confidence interval over
    prompts. prompts: of each response."""
    counts = counts_of(desirable_S)
    inputs = UnpairedLossInputs(
        torch.from_numpy(logratios_S), torch.from_numpy(desirable_S), kl, counts
    )
    metrics = as_metrics(unpaired_loss(config.algorithm.loss)(inputs))
    if not (counts.desirable and counts.undesirable):
        return metrics
    share = share_ahead(logratios_S[desirable_S], logratios_S[~desirable_S])
    effect = separation_effect(logratios_S, desirable_S, prompts)
    low, high = separation_interval(share, counts.desirable / effect, counts.undesirable / effect)
    accuracy = {"accuracy": share, "accuracy_low": low, "accuracy_high": high}
    return {"loss": metrics["loss"]} | accuracy | metrics  # in the order in which they are shown


def counts_of(desirable_S: Bools) -> LabelCounts:
    """How many responses there are of each label."""
    desirable = int(desirable_S.sum())
    return LabelCounts(desirable, len(desirable_S) - desirable)


def measure(spec: RunSpec[KtoConfig], directory: Path) -> dict[str, float]:
    """The loss on labelled responses and its metrics, the accuracy with its interval; compared as
    pairs are, with the KL of all rows together."""
    loaded = load_held_out(spec, load_responses)
    samples = [row.sample for row in loaded.items]
    others = mismatched(samples, spec.data.max_tokens)
    found = []
    with closing(start_cluster(spec.cluster, ())) as cluster:
        load_measured(cluster, spec, "actor")
        load_measured(cluster, spec, "reference")
        budget = spec.workload.largest_pack(cluster.ranks)
        for part in parts_of(list(zip(samples, others, strict=True)), cluster):
            packs = pack(list(chain(*part)), cluster.ranks, budget)
            own = log_probs("actor", packs, cluster)
            found.append(own - log_probs("reference", packs, cluster))
    logratios = np.concatenate(found)  # of a row, and of its prompt with another response
    desirable_S = np.array([row.desirable for row in loaded.items])
    kl = kl_baseline(torch.from_numpy(logratios[1::2]))
    prompts = [row.prompt for row in loaded.items]
    metrics = response_metrics(spec.config, logratios[::2], desirable_S, prompts, kl)
    return metrics | row_counts(loaded)
