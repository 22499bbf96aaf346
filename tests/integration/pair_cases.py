"""What the tests of learning from pairs train on, and the same training in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import Batch, make_batch
from engine_reference import Metrics, plain_logprobs, plain_policy
from torch import Tensor

from plimsoll.config.base import Choice
from plimsoll.data.packing import pack_pairs
from plimsoll.records import Pack, Pair, Sample
from plimsoll.trainer.objectives import PreferenceObjective
from plimsoll.trainer.process_group import Place


def with_prompts(batch: Batch) -> Batch:
    """Both samples of a pair begin alike, for half of the shorter one's tokens: their prompt, of
    which nothing is learned. Of each response the last token is."""
    samples: list[Sample] = []
    for both in zip(batch.samples[0::2], batch.samples[1::2], strict=True):
        prompt = both[0].tokens[: min(len(sample.tokens) for sample in both) // 2]
        for sample in both:
            tokens = np.concatenate([prompt, sample.tokens[len(prompt) :]])
            places = np.arange(len(tokens))
            loss_mask = (sample.loss_mask & (places >= len(prompt))) | (places == len(tokens) - 1)
            samples.append(Sample(tokens, loss_mask))
    return replace(batch, samples=tuple(samples))


PAIR_BATCHES = tuple(
    with_prompts(make_batch((9, 30, 14, 6, 22, 8, 17, 5, 12, 12), seed)) for seed in (1, 2, 3)
)
"""Five pairs a step: samples 0 and 1, 2 and 3, ..."""
ONE_PAIR = tuple(with_prompts(make_batch((12, 7), seed)) for seed in (4, 5, 6))
"""Fewer pairs than ranks."""
DPO = PreferenceObjective(
    Choice(name="dpo", options={"beta": 0.3, "label_smoothing": 0.1}), nll_weight=0.2
)
SIMPO = PreferenceObjective(
    Choice(name="simpo", options={"beta": 2.5, "gamma": 0.4}), nll_weight=0.0
)


def pairs_of(batch: Batch) -> list[Pair]:
    chosen, rejected = batch.samples[0::2], batch.samples[1::2]
    return [Pair(*both) for both in zip(chosen, rejected, strict=True)]


def own_pair_packs(place: Place, batch: Batch, budget: int, *, share: bool) -> list[Pack]:
    """The rank's micro-batches. share: a pair's prompt is in them once."""
    streams, own = place.ranks // place.shards, place.rank // place.shards
    return pack_pairs(pairs_of(batch), streams, place.shards * budget, share_prompts=share)[own]


def plain_sums(model: Any, batch: Batch) -> Tensor:
    """The log-prob of each sample's learned tokens together."""
    return torch.stack([plain_logprobs(model, sample)[0].sum() for sample in batch.samples])


@dataclass(frozen=True)
class PlainDpo:
    """`DPO` against a model, pair by pair, as the papers write it."""

    reference: Path

    def __call__(self, model: Any, batch: Batch) -> Metrics:
        with torch.no_grad():
            reference_S = plain_sums(plain_policy(self.reference), batch)
        policy_S = plain_sums(model, batch)
        terms, nlls, margins = [], [], []
        for i in range(0, len(policy_S), 2):
            chosen, rejected = policy_S[i] - reference_S[i], policy_S[i + 1] - reference_S[i + 1]
            right = torch.sigmoid(0.3 * (chosen - rejected))
            terms.append(-0.9 * torch.log(right) - 0.1 * torch.log(1 - right))
            nlls.append(-policy_S[i] / int(batch.samples[i].loss_mask.sum()))
            margins.append(0.3 * (chosen - rejected))
        loss, nll = torch.stack(terms).mean(), torch.stack(nlls).mean()
        margin = torch.stack(margins)
        return {
            "loss": loss + 0.2 * nll,
            "preference_loss": loss,
            "nll": nll,
            "rewards/margin": margin.mean(),
            "accuracy": (margin > 0).float().mean(),
        }


def plain_simpo(model: Any, batch: Batch) -> Metrics:
    """`SIMPO`, pair by pair."""
    means = [plain_logprobs(model, sample)[0].mean() for sample in batch.samples]
    margins = [2.5 * (means[i] - means[i + 1]) for i in range(0, len(means), 2)]
    terms = [-torch.log(torch.sigmoid(margin - 0.4)) for margin in margins]
    return {"loss": torch.stack(terms).mean(), "rewards/margin": torch.stack(margins).mean()}
