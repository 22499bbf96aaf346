"""Process reward model: learn from labelled steps to score the steps of solutions.

    plimsoll prm CONFIG.yaml

Lightman et al. 2023. In this file a step is a step of a solution, unless it is called an optimizer
step. The score of a step is the log-odds that it is right, read at its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.figures import calibrate, share_interval, sigmoid
from plimsoll.algorithm.token_losses import process_loss
from plimsoll.cluster.protocol import Cluster
from plimsoll.data.dataset import load_steps
from plimsoll.jobs.prm import PrmConfig
from plimsoll.model.policy import at_marks
from plimsoll.records import BatchCounts, Floats, LabelledSteps
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_scorer
from plimsoll.train.measure import PICTURE, output_metrics, score_in_parts, show_calibration
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import OptimizerStep, pack_rows, score_packs
from plimsoll.trainer.objectives import STEP_LABELS, ProcessObjective
from plimsoll.trainer.worker import Worker

PrmWork = Work[PrmConfig, LabelledSteps]


def run(spec: RunSpec[PrmConfig], planned: Planned) -> None:
    """Train the model. `run.resume` decides whether an earlier run goes on."""
    with work_on_rows(spec, planned, load_steps) as work:
        load_scorer(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def learn(work: PrmWork, batch: Sequence[LabelledSteps]) -> OptimizerStep:
    """Return the optimizer step for a batch of solutions with labelled steps."""
    packs, labels = pack_rows(work.spec, batch, work.cluster), [row.labels for row in batch]
    return OptimizerStep(packs, counts_of(batch), ProcessObjective(), {STEP_LABELS: labels})


def evaluate(work: PrmWork) -> dict[str, float]:
    """Return the loss on the held-out solutions and its metrics; draw the calibration."""
    scores = score_steps(work.spec, work.cluster, work.data.eval)
    return process_metrics(scores, work.data.eval, work.session.directory.calibration_path)


def process_metrics(
    scores: Sequence[Floats], rows: Sequence[LabelledSteps], output_svg: Path
) -> dict[str, float]:
    """Return the metrics of steps and of solutions by name, and draw the calibration.

    `scores` has the scores of each row's steps; `output_svg` is the file of the drawing.
    """
    flat, labels = np.concatenate(scores), np.concatenate([row.labels for row in rows])
    output = process_loss(torch.from_numpy(flat), torch.from_numpy(labels), counts_of(rows))
    calibration = calibrate(sigmoid(flat), labels)
    title = f"{len(flat):,} held-out steps"
    return (
        output_metrics(output)
        | show_calibration(calibration, title, output_svg)
        | solution_metrics(scores, rows)
    )


def solution_metrics(scores: Sequence[Floats], rows: Sequence[LabelledSteps]) -> dict[str, float]:
    """Return `solution_accuracy` with its 95 % confidence interval, and `right_solutions`.

    A solution is right if all of its steps are. The model judges a solution right if the scores of
    all its steps exceed 0. `solution_accuracy` is the share of solutions that the model judges
    correctly; its interval is over prompts. `right_solutions` is the share of right solutions.
    """
    judged_right = np.array([steps.min() > 0 for steps in scores])
    right = np.array([row.labels.min() > 0.5 for row in rows])
    share = float((judged_right == right).mean())
    low, high = share_interval(judged_right == right, [row.prompt for row in rows])
    return {
        "solution_accuracy": share,
        "solution_accuracy_low": low,
        "solution_accuracy_high": high,
        "right_solutions": float(right.mean()),
    }


def score_steps(
    spec: RunSpec[PrmConfig], cluster: Cluster, rows: Sequence[LabelledSteps]
) -> list[Floats]:
    """Return an array for each row: the scores (log-odds) of its steps."""
    packs = pack_rows(spec, rows, cluster)
    return score_packs(cluster, Worker.values_at, spec.sender.name, packs, at_marks)


def counts_of(rows: Sequence[LabelledSteps]) -> BatchCounts:
    """Return the numbers of steps and of rows; the steps count as tokens, for each has one mark."""
    return BatchCounts(sum(len(row.labels) for row in rows), len(rows))


def measure(spec: RunSpec[PrmConfig], directory: Path) -> dict[str, float]:
    """Return the loss on the held-out solutions, its metrics, and the counts of rows, by name.

    The calibration is drawn into `directory`.
    """
    loaded = load_held_out(spec, load_steps)
    scores = [*chain(*score_in_parts(spec, loaded.items, partial(score_steps, spec)))]
    picture = directory / PICTURE
    return process_metrics(scores, loaded.items, picture) | row_counts(loaded)
