"""Kahneman-Tversky optimisation: learning from single responses that are good or bad.

    plimsoll kto CONFIG.yaml

Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306. Each step draws labelled responses,
estimates the KL of the policy from the reference, and takes an optimizer step on the loss of the
config. The KL is estimated before the update, on all of the step's prompts, each joined with the
response to another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.choice import feedback_loss
from plimsoll.algorithm.feedback import kl_baseline
from plimsoll.algorithm.figures import separation_effect, separation_interval, share_ahead
from plimsoll.algorithm.inputs import FeedbackLossInputs, LabelCounts
from plimsoll.cluster.protocol import Cluster
from plimsoll.data.dataset import load_responses
from plimsoll.data.stored import column_of
from plimsoll.errors import DataError
from plimsoll.jobs.kto import KtoConfig
from plimsoll.jobs.roles import REFERENCE
from plimsoll.records import BatchCounts, Bools, Floats, LabelledResponse, Sample, samples_of
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.measure import output_metrics, score_in_parts
from plimsoll.train.reference import Reference, ScoringPhase, load_with_reference
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import OptimizerStep, Packs, log_probs, pack_rows
from plimsoll.trainer.objectives import DESIRABLE, SEQUENCE_REFERENCE, FeedbackObjective

KtoWork = Work[KtoConfig, LabelledResponse]

ScoredSamples = tuple[Packs, Floats]
"""Samples in packs, and their log-probs under the reference."""
Responses = tuple[ScoredSamples, ScoredSamples]
"""The rows' samples, and the samples that join their prompts with other prompts' responses."""


def run(spec: RunSpec[KtoConfig], planned: Planned) -> None:
    """Train the policy. `run.resume` decides whether an earlier run goes on."""
    feedback_loss(spec.config.algorithm.loss)
    with work_on_rows(spec, planned, load_responses) as work:
        check_labels(work.data.train)
        reference = load_with_reference(
            work,
            REFERENCE,
            lambda: chain.from_iterable(
                match_and_mismatch(spec, rows) for rows in work.batches_ahead()
            ),
            spec.config.reference_logprobs,
        )
        held_out = None
        if spec.run.eval_every is not None:
            held_out = score(work, reference, work.data.eval, "eval")
        learn_from_data(work, partial(learn, work, reference), partial(evaluate, work, held_out))


def check_labels(rows: Sequence[LabelledResponse]) -> None:
    """Raise DataError if all rows have the same label, because KTO learns to tell labels apart."""
    labels = set(column_of(rows, "desirable").tolist())
    if len(labels) == 1:
        word = "desirable" if labels == {True} else "undesirable"
        every = "The only row" if len(rows) == 1 else f"Every one of the {len(rows):,} rows"
        raise DataError(
            f"{every} to learn from is labelled {word}, and KTO learns "
            f"what tells the two apart. Check data.train.label and data.train.limit; desirable "
            f"responses alone are learned by `plimsoll sft`."
        )


def match_and_mismatch(
    spec: RunSpec[KtoConfig], rows: Sequence[LabelledResponse]
) -> tuple[list[Sample], list[Sample]]:
    """Return the rows' samples, and the samples of `mismatch_responses` made from them."""
    samples = samples_of(rows)
    return samples, mismatch_responses(samples, spec.data.max_tokens)


def score(
    work: KtoWork, reference: Reference, rows: Sequence[LabelledResponse], phase: ScoringPhase
) -> Responses:
    """Return the rows, matched and mismatched, in packs with the reference's log-probs."""

    def pack_and_score(samples: Sequence[Sample]) -> ScoredSamples:
        packs = pack_rows(work.spec, samples, work.cluster)
        return packs, reference(samples, packs, phase)

    matched, mismatched = match_and_mismatch(work.spec, rows)
    return pack_and_score(matched), pack_and_score(mismatched)


def learn(work: KtoWork, reference: Reference, batch: Sequence[LabelledResponse]) -> OptimizerStep:
    """Score a batch and estimate its KL; return the policy's optimizer step for the batch."""
    (packs, reference_S), mismatched = score(work, reference, batch, "score")
    with work.session.phase("score", work.cluster):
        kl = measure_kl(work, mismatched)
    desirable_S = labels_of(batch)
    columns = {SEQUENCE_REFERENCE: reference_S, DESIRABLE: desirable_S}
    objective = FeedbackObjective(work.config.algorithm.loss, kl, counts_of(desirable_S))
    return OptimizerStep(packs, BatchCounts.of(samples_of(batch)), objective, columns)


def measure_kl(work: KtoWork, mismatched: ScoredSamples) -> float:
    """Return the KL of the policy from the reference in nats per response (see `kl_baseline`)."""
    packs, reference_S = mismatched
    policy_S = log_probs(work.spec.sender.name, packs, work.cluster)
    return kl_baseline(torch.from_numpy(policy_S - reference_S))


def evaluate(work: KtoWork, held_out: Responses | None) -> dict[str, float]:
    """Return the loss on the held-out rows and its metrics; all rows share one KL estimate."""
    assert held_out is not None, "evaluated without run.eval_every"
    (packs, reference_S), mismatched = held_out
    kl = measure_kl(work, mismatched)
    logratios_S = log_probs(work.spec.sender.name, packs, work.cluster) - reference_S
    return response_metrics(work.config, work.data.eval, logratios_S, kl)


def response_metrics(
    config: KtoConfig, rows: Sequence[LabelledResponse], logratios_S: Floats, kl: float
) -> dict[str, float]:
    """Return the loss on labelled responses and its metrics.

    `logratios_S` has the policy's log-prob minus the reference's (nats) for each row; `kl` is the
    estimate of `measure_kl`. If there are responses of each label, `accuracy` is the share of
    pairings in which the desirable response has the larger log-ratio, with its 95 % confidence
    interval.
    """
    desirable_S, prompts = labels_of(rows), [row.prompt for row in rows]
    counts = counts_of(desirable_S)
    inputs = FeedbackLossInputs(
        torch.from_numpy(logratios_S), torch.from_numpy(desirable_S), kl, counts
    )
    metrics = output_metrics(feedback_loss(config.algorithm.loss)(inputs))
    if not (counts.desirable and counts.undesirable):
        return metrics
    share = share_ahead(logratios_S[desirable_S], logratios_S[~desirable_S])
    effect = separation_effect(logratios_S, desirable_S, prompts)
    low, high = separation_interval(share, counts.desirable / effect, counts.undesirable / effect)
    accuracy = {"accuracy": share, "accuracy_low": low, "accuracy_high": high}
    return {"loss": metrics["loss"]} | accuracy | metrics  # in the order of the display


def labels_of(rows: Sequence[LabelledResponse]) -> Bools:
    """Return True for each desirable response; bool, shape [S]."""
    return np.array([row.desirable for row in rows])


def counts_of(desirable_S: Bools) -> LabelCounts:
    """Return the number of responses of each label."""
    desirable = int(desirable_S.sum())
    return LabelCounts(desirable, len(desirable_S) - desirable)


def measure(spec: RunSpec[KtoConfig], directory: Path) -> dict[str, float]:
    """Return the loss on the held-out rows and its metrics; all rows share one KL estimate."""
    actor, loaded = spec.sender.name, load_held_out(spec, load_responses)

    def log_ratios(cluster: Cluster, part: Sequence[tuple[Sample, Sample]]) -> Floats:
        packs = pack_rows(spec, list(chain(*part)), cluster)
        return log_probs(actor, packs, cluster) - log_probs(REFERENCE, packs, cluster)

    rows = list(zip(*match_and_mismatch(spec, loaded.items), strict=True))
    parts = score_in_parts(spec, rows, log_ratios, actor, REFERENCE)
    logratios = np.concatenate(parts)  # of a row, then of its prompt with another response, ...
    kl = kl_baseline(torch.from_numpy(logratios[1::2]))
    return response_metrics(spec.config, loaded.items, logratios[::2], kl) | row_counts(loaded)


def mismatch_responses(samples: Sequence[Sample], longest: int) -> list[Sample]:
    """Return samples that join each sample's prompt with the response to another prompt.

    The response is taken from the next sample of the batch with another prompt; the first sample
    follows the last. If all prompts are equal, the response is taken from the next sample.

    A response is everything from the first learned token on. Source: Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306, section 4.2; the paper takes the next sample whatever its
    prompt.

    Args:
        samples: the batch.
        longest: tokens after which a joined sample is cut. Every prompt must be shorter.

    Raises:
        DataError: the batch has a single sample, so there is no other response.
    """
    if len(samples) < 2:
        raise DataError(
            "KTO measures its KL on prompts with other responses, and there is only one row: give "
            "data.eval at least two."
        )
    starts = [int(np.argmax(sample.loss_mask)) for sample in samples]
    prompts = [s.tokens[:start].tobytes() for s, start in zip(samples, starts, strict=True)]
    return [
        _join(samples[i], starts[i], samples[j], starts[j], longest)
        for i, j in enumerate(_partners(prompts))
    ]


def _partners(prompts: Sequence[bytes]) -> list[int]:
    """Return for each sample the index of the next sample with another prompt.

    The search goes backwards, because neighbours with the same prompt have the same partner.
    """
    count = len(prompts)
    changes = [i for i in range(count) if prompts[i] != prompts[(i + 1) % count]]
    if not changes:
        return [(i + 1) % count for i in range(count)]
    partners = [0] * count
    following = (changes[0] + 1) % count
    for i in reversed(range(count)):
        if prompts[i] != prompts[(i + 1) % count]:
            following = (i + 1) % count
        partners[i] = following
    return partners


def _join(prompted: Sample, start: int, answered: Sample, first: int, longest: int) -> Sample:
    tokens = np.concatenate([prompted.tokens[:start], answered.tokens[first:]])[:longest]
    loss_mask = np.concatenate([prompted.loss_mask[:start], answered.loss_mask[first:]])[:longest]
    return Sample(tokens, loss_mask)
