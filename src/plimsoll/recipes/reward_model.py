"""Reward model: learning from pairs to score a whole response; Ouyang et al. 2022.

    plimsoll rm CONFIG.yaml

A score is read at the token that ends the response, so each sequence is cut there. The loss is a
mean over the pairs of the whole step, so no split into packs, micro-batches or ranks changes it;
both responses of a pair are in the same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.calibration import calibrate_pairs
from plimsoll.algorithm.choice import reward_loss
from plimsoll.algorithm.inputs import RewardLossInputs
from plimsoll.algorithm.preference import in_pairs
from plimsoll.algorithm.reward import reward_objective
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.jobs import RmConfig
from plimsoll.data.dataset import load_pairs
from plimsoll.data.loading import Loaded, Seen, unseen
from plimsoll.data.template import Template
from plimsoll.engine.objectives.reward import RewardObjective, RewardStream
from plimsoll.engine.worker import StepResult, Worker
from plimsoll.model.value import at_ends
from plimsoll.recipes.from_data import Work, learn_from_data, open_work
from plimsoll.recipes.pairs import as_pair_metrics, pack_rows, prompts_of, samples_of
from plimsoll.recipes.scoring import load_scorer, show_calibration
from plimsoll.recipes.update import Packs, in_batch_order, update
from plimsoll.records import BatchCounts, Floats, Pack, Pair, Sample

RmWork = Work[RmConfig, Pair]


def run_rm(config: RmConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    reward_loss(config.algorithm.loss)  # a wrong name or option ends the run right here
    with open_work("rm", config, load_scored_pairs) as work:
        with work.session.phase("load", work.cluster):
            load_scorer(work, samples_of(work.train))
        learn_from_data(
            work,
            config.batch.pairs,
            lambda pair: pair.tokens,
            partial(learn, work),
            partial(evaluate, work),
        )


def load_scored_pairs(
    data: DataConfig, source: SourceConfig, template: Template, seen: Seen = unseen
) -> Loaded[Pair]:
    """As `load_pairs`, each response marked where its score is read."""
    loaded = load_pairs(data, source, template, seen)
    pairs = (
        replace(pair, chosen=up_to_end(pair.chosen), rejected=up_to_end(pair.rejected))
        for pair in loaded.items
    )
    return Loaded(tuple(pairs), loaded.bad_rows, loaded.cut_rows)


def up_to_end(sample: Sample) -> Sample:
    """A response without what a template writes after it; only its last token is marked."""
    end = int(np.flatnonzero(sample.learned)[-1])
    return Sample(sample.tokens[: end + 1], np.arange(end + 1) == end)


def learn(work: RmWork, batch: Sequence[Pair], rate: float) -> list[StepResult]:
    """One optimizer step on all ranks."""
    cluster, algorithm = work.cluster, work.config.algorithm
    packs = pack_rows(work.config, batch, cluster)
    margins = margins_of(batch)
    streams = [[RewardStream(margins[pairs_of(pack)]) for pack in own] for own in packs]
    counts = BatchCounts(2 * len(batch), 2 * len(batch))
    objective = RewardObjective(algorithm.loss, algorithm.centring)
    with work.session.phase("train_actor", cluster):
        return update("actor", cluster, packs, streams, counts, objective, rate)


def margins_of(pairs: Sequence[Pair]) -> Floats:
    return np.array([pair.margin for pair in pairs], dtype=np.float32)


def pairs_of(pack: Pack) -> Sequence[int]:
    """Which pairs of the batch a pack of `pack_pairs` holds; none in a filler."""
    return [int(sample) // 2 for sample in pack.samples_S[::2] if sample >= 0]


def evaluate(work: RmWork) -> dict[str, float]:
    """The loss on the held-out pairs and its metrics, with the accuracy's 95 % confidence interval
    and the calibration error; draws the calibration."""
    scores = score_pairs(pack_rows(work.config, work.eval, work.cluster), work.cluster)
    picture = work.session.directory.calibration_path
    return score_metrics(work.config, scores, work.eval, picture)


def score_metrics(
    config: RmConfig, scores: Floats, pairs: Sequence[Pair], output_png: Path
) -> dict[str, float]:
    """The loss on pairs and its metrics, with the accuracy's 95 % confidence interval and the
    calibration error; draws the calibration. scores: of each sequence (chosen, rejected, chosen,
    ...)."""
    algorithm = config.algorithm
    by_pair = in_pairs(torch.from_numpy(scores))
    inputs = RewardLossInputs(by_pair, torch.from_numpy(margins_of(pairs)), len(pairs))
    output = reward_objective(inputs, reward_loss(algorithm.loss), algorithm.centring)
    calibration = calibrate_pairs(by_pair.margin_P.numpy())
    title = f"{len(pairs):,} held-out pairs, each in both orders"
    return as_pair_metrics(output, prompts_of(pairs)) | show_calibration(
        calibration, title, output_png
    )


def score_pairs(packs: Packs, ranks: Cluster) -> Floats:
    """The score of each sequence of a batch, in its order."""
    found = ranks.each(Worker.values, [("actor", own, at_ends) for own in packs])
    return in_batch_order(packs, found)
