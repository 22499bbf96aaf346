"""Process reward model: learning from labelled steps to score each step; Lightman et al. 2023.

    plimsoll prm CONFIG.yaml

A step's score is read at its last token: the log-odds that the step is right. The loss is a mean
over the steps of all responses of the optimizer step, so no split into packs, micro-batches or
ranks changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from plimsoll.algorithm.calibration import calibrate, sigmoid
from plimsoll.algorithm.process_reward import process_loss
from plimsoll.config.jobs import PrmConfig
from plimsoll.data.dataset import load_steps
from plimsoll.data.packing import pack
from plimsoll.engine.objectives.process import ProcessObjective, ProcessStream
from plimsoll.engine.worker import StepResult, Worker
from plimsoll.model.value import at_marks
from plimsoll.recipes.from_data import Work, learn_from_data, open_work
from plimsoll.recipes.scoring import load_scorer, show_calibration
from plimsoll.recipes.update import Packs, told, update
from plimsoll.records import BatchCounts, LabelledSteps, from_packed, to_packed

PrmWork = Work[PrmConfig, LabelledSteps]


def run_prm(config: PrmConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    with open_work("prm", config, load_steps) as work:
        with work.session.phase("load", work.cluster):
            load_scorer(work, [row.sample for row in work.train])
        learn_from_data(
            work,
            config.batch.sequences,
            lambda row: len(row.sample.tokens),
            partial(learn, work),
            partial(evaluate, work),
        )


def learn(work: PrmWork, batch: Sequence[LabelledSteps], rate: float) -> list[StepResult]:
    """One optimizer step on all ranks."""
    packs = pack_rows(work, batch)
    labels = [row.labels for row in batch]
    streams = [[ProcessStream(to_packed(pack, labels)) for pack in own] for own in packs]
    with work.session.phase("train_actor", work.cluster):
        return update(
            "actor", work.cluster, packs, streams, counts_of(batch), ProcessObjective(), rate
        )


def evaluate(work: PrmWork) -> dict[str, float]:
    """The loss on the held-out steps and its metrics, as `eval/<name>`, with the calibration error;
    draws the calibration."""
    packs = pack_rows(work, work.eval)
    found = work.cluster.each(Worker.values, [("actor", own, at_marks) for own in packs])
    flat = [array for own in found for array in own]
    per_row = from_packed([pack for own in packs for pack in own], flat, len(work.eval))
    scores, labels = np.concatenate(per_row), np.concatenate([row.labels for row in work.eval])
    counts = counts_of(work.eval)
    output = process_loss(torch.from_numpy(scores), torch.from_numpy(labels), counts)
    metrics = told(output)
    calibration = calibrate(sigmoid(scores), labels)
    metrics |= show_calibration(work.session, calibration, f"{len(scores):,} held-out steps")
    return {f"eval/{name}": value for name, value in metrics.items()}


def pack_rows(work: PrmWork, rows: Sequence[LabelledSteps]) -> Packs:
    budget = work.config.batch.micro_batch_tokens
    return pack([row.sample for row in rows], work.cluster.ranks, budget)


def counts_of(rows: Sequence[LabelledSteps]) -> BatchCounts:
    """tokens: steps, each of which has one that is marked."""
    return BatchCounts(sum(len(row.labels) for row in rows), len(rows))
