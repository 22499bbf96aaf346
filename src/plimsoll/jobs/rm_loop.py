"""Reward model: learn from pairs to score responses; Ouyang et al. 2022.

    plimsoll rm CONFIG.yaml

The score of a response is read at the token that ends it, so each sequence is cut after this token.
Both responses of a pair are in the same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.choice import reward_loss
from plimsoll.algorithm.figures import calibrate_pairs
from plimsoll.algorithm.inputs import RewardLossInputs
from plimsoll.algorithm.preference import in_pairs, reward_objective
from plimsoll.cluster.protocol import Cluster
from plimsoll.data.dataset import load_scored_pairs
from plimsoll.jobs.rm import RmConfig
from plimsoll.model.policy import at_ends
from plimsoll.records import BatchCounts, Floats, Pair
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_scorer
from plimsoll.train.measure import PICTURE, pair_output_metrics, score_in_parts, show_calibration
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import OptimizerStep, pack_rows, score_packs
from plimsoll.trainer.objectives import MARGIN, RewardObjective
from plimsoll.trainer.worker import Worker

RmWork = Work[RmConfig, Pair]


def run(spec: RunSpec[RmConfig], planned: Planned) -> None:
    """Train the model. `run.resume` decides whether an earlier run goes on."""
    reward_loss(spec.config.algorithm.loss)
    with work_on_rows(spec, planned, load_scored_pairs) as work:
        load_scorer(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def learn(work: RmWork, batch: Sequence[Pair]) -> OptimizerStep:
    """Return the optimizer step for a batch of pairs."""
    algorithm = work.config.algorithm
    return OptimizerStep(
        pack_rows(work.spec, batch, work.cluster),
        BatchCounts(2 * len(batch), 2 * len(batch)),
        RewardObjective(algorithm.loss, algorithm.centring),
        {MARGIN: np.repeat(margins_of(batch), 2)},
        unit=2,
    )


def margins_of(pairs: Sequence[Pair]) -> Floats:
    """Return the margins of pairs, shape [P]."""
    return np.array([pair.margin for pair in pairs], dtype=np.float32)


def evaluate(work: RmWork) -> dict[str, float]:
    """Return the loss on the held-out pairs and its metrics, and draw the calibration."""
    scores = score_pairs(work.spec, work.cluster, work.data.eval)
    return score_metrics(
        work.config, scores, work.data.eval, work.session.directory.calibration_path
    )


def score_metrics(
    config: RmConfig, scores: Floats, pairs: Sequence[Pair], output_svg: Path
) -> dict[str, float]:
    """Return the loss on pairs and its metrics, and draw the calibration.

    The metrics include the accuracy's 95 % confidence interval and the calibration error. `scores`
    has a number for each sequence in the order chosen, rejected, chosen, ...
    """
    algorithm = config.algorithm
    by_pair = in_pairs(torch.from_numpy(scores))
    inputs = RewardLossInputs(by_pair, torch.from_numpy(margins_of(pairs)), len(pairs))
    output = reward_objective(inputs, reward_loss(algorithm.loss), algorithm.centring)
    calibration = calibrate_pairs(by_pair.margin_P.numpy())
    title = f"{len(pairs):,} held-out pairs, each in both orders"
    return pair_output_metrics(output, pairs) | show_calibration(calibration, title, output_svg)


def score_pairs(spec: RunSpec[RmConfig], cluster: Cluster, pairs: Sequence[Pair]) -> Floats:
    """Return the score of each response, in the order chosen, rejected, chosen, ...; [2 P]."""
    packs = pack_rows(spec, pairs, cluster)
    scores = score_packs(cluster, Worker.values_at, spec.sender.name, packs, at_ends, layout="S")
    return np.concatenate(scores)


def measure(spec: RunSpec[RmConfig], directory: Path) -> dict[str, float]:
    """Return a model's loss on the held-out pairs and its metrics, and draw the calibration."""
    loaded = load_held_out(spec, load_scored_pairs)
    scores = np.concatenate(score_in_parts(spec, loaded.items, partial(score_pairs, spec)))
    picture = directory / PICTURE
    return score_metrics(spec.config, scores, loaded.items, picture) | row_counts(loaded)
