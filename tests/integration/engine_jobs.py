"""What each job teaches a role in one step, and the same in plain PyTorch, unpacked, as the papers
write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from distill_cases import OBJECTIVE as DISTILLATION
from distill_cases import PlainDistillation
from engine_cases import (
    BATCHES,
    CLIP_VALUE,
    OBJECTIVE,
    SEED,
    SPARSE,
    Batch,
    cut_for,
    own_packs,
    policy_columns,
    value_columns,
)
from engine_reference import (
    Loss,
    Metrics,
    plain_policy,
    plain_scores,
    policy_loss,
    sft_loss,
    value_loss,
)
from pair_cases import (
    DPO,
    ONE_PAIR,
    PAIR_BATCHES,
    SIMPO,
    PlainDpo,
    own_pair_packs,
    plain_simpo,
    plain_sums,
)

from plimsoll.algorithm.inputs import LabelCounts
from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.records import Floats, Pack, PackColumns
from plimsoll.resolve.roles import HeadKind
from plimsoll.trainer.objectives import (
    DESIRABLE,
    MARGIN,
    SEQUENCE_REFERENCE,
    STEP_LABELS,
    FeedbackObjective,
    NllObjective,
    ProcessObjective,
    RewardObjective,
    ValueObjective,
)
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.protocol import Objective
from plimsoll.trainer.worker import Worker

MARGINS = np.array([0, 0.5, 1, 0, 2], dtype=np.float32)
"""How far the chosen response of each pair should be ahead."""
CENTRING = 0.3
FEEDBACK = {"beta": 0.5, "undesirable_weight": 1.5}
KL = 0.1
"""The KL that the feedback loss is given."""


@dataclass(frozen=True)
class Lesson:
    """What one rank learns from in one step.

    Attributes:
        columns: Those of each pack; None where the teacher has made them.
    """

    packs: list[Pack]
    columns: Sequence[PackColumns] | None
    objective: Objective


Teach = Callable[[Worker, Place, Batch, int, bool], Lesson]
"""Makes a rank's lesson. Args: worker, place, batch, budget, whether pairs share their prompts."""


@dataclass(frozen=True)
class Job:
    """A kind of training.

    Attributes:
        other: The role that the trained one is compared with.
        plain: Returns the loss in plain PyTorch, given the other role's model.
        sparse: Batches with less to learn than there are ranks.
    """

    teach: Teach
    plain: Callable[[Path], Loss]
    head: HeadKind = "policy"
    other: Literal["none", "reference", "teacher"] = "none"
    batches: tuple[Batch, ...] = BATCHES
    sparse: tuple[Batch, ...] = SPARSE

    def load(self, worker: Worker, role: TrainedRole) -> None:
        """Load what is trained."""
        worker.load_model("actor", role, 1.0, SEED, self.head)

    def load_other(self, worker: Worker, role: FrozenRole) -> None:
        """Load what it is compared with, if there is anything."""
        if self.other == "teacher":
            worker.load_model("teacher", role, head="states")
        elif self.other == "reference":
            worker.load_model("reference", role, 1.0)


def _imitate(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    return Lesson(packs, cut_for(packs, {}), NllObjective())


def _sample(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    return Lesson(packs, cut_for(packs, policy_columns(batch)), OBJECTIVE)


def _estimate(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    columns = cut_for(packs, value_columns(batch))
    return Lesson(packs, columns, ValueObjective(CLIP_VALUE))


def _prefer(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_pair_packs(place, batch, budget, share=share)
    scored = worker.sequence_log_probs("reference", packs)
    return Lesson(packs, [{SEQUENCE_REFERENCE: scores} for scores in scored], DPO)


def _prefer_alone(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_pair_packs(place, batch, budget, share=share)
    return Lesson(packs, cut_for(packs, {}), SIMPO)


def _rate(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    scored = worker.sequence_log_probs("reference", packs)
    numbers = [pack.samples_S[pack.samples_S >= 0] for pack in packs]
    columns = [
        {SEQUENCE_REFERENCE: scores[: len(own)], DESIRABLE: own % 2 == 0}
        for scores, own in zip(scored, numbers, strict=True)
    ]
    half = batch.counts.sequences // 2
    loss = Choice(name="kto", options=dict(FEEDBACK))
    return Lesson(packs, columns, FeedbackObjective(loss, KL, LabelCounts(half, half)))


def _reward(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_pair_packs(place, batch, budget, share=share)
    columns = cut_for(packs, {MARGIN: np.repeat(MARGINS, 2)})
    return Lesson(packs, columns, RewardObjective(Choice(name="log_sigmoid"), CENTRING))


def _reward_steps(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    columns = [{STEP_LABELS: labels_of(pack.targets_L)} for pack in packs]
    return Lesson(packs, columns, ProcessObjective())


def _distil(worker: Worker, place: Place, batch: Batch, budget: int, share: bool) -> Lesson:
    packs = own_packs(place, batch, budget)
    worker.teacher_forward("teacher", packs)
    return Lesson(packs, None, DISTILLATION)


def labels_of(tokens: np.ndarray[Any, Any]) -> Floats:
    """Return the label of the step that each token ends: wrong, between, or right."""
    return (tokens % 3 / 2).astype(np.float32)


def plain_feedback(reference: Path) -> Loss:
    """Return KTO's loss against a model: even samples are desirable, odd ones are not."""

    def loss(model: Any, batch: Batch) -> Metrics:
        with torch.no_grad():
            reference_S = plain_sums(plain_policy(reference), batch)
        beta, weight = FEEDBACK["beta"], FEEDBACK["undesirable_weight"]
        ratio_S = plain_sums(model, batch) - reference_S
        good = [1 - torch.sigmoid(beta * (ratio - KL)) for ratio in ratio_S[0::2]]
        bad = [weight * (1 - torch.sigmoid(beta * (KL - ratio))) for ratio in ratio_S[1::2]]
        desirable, undesirable = beta * ratio_S[0::2].mean(), beta * ratio_S[1::2].mean()
        return {
            "loss": torch.stack([*good, *bad]).mean(),
            "rewards/desirable": desirable,
            "rewards/undesirable": undesirable,
            "rewards/margin": desirable - undesirable,
        }

    return loss


def plain_rewards(model: Any, batch: Batch) -> Metrics:
    """Compute the reward model's loss, pair by pair."""
    terms, squares, ahead = [], [], []
    for i in range(len(batch.samples) // 2):
        chosen, rejected = (plain_scores(model, batch.samples[2 * i + j])[-1] for j in (0, 1))
        terms.append(-torch.log(torch.sigmoid(chosen - rejected - float(MARGINS[i]))))
        squares.append((chosen + rejected) ** 2)
        ahead.append(chosen - rejected)
    loss, off = torch.stack(terms).mean(), torch.stack(squares).mean()
    return {
        "loss": loss + CENTRING * off,
        "reward_loss": loss,
        "off_centre": off,
        "rewards/margin": torch.stack(ahead).mean(),
        "accuracy": (torch.stack(ahead) > 0).float().mean(),
    }


def plain_process(model: Any, batch: Batch) -> Metrics:
    """Compute the process reward model's loss, step by step."""
    scores = torch.cat([plain_scores(model, sample) for sample in batch.samples])
    tokens = np.concatenate([sample.tokens[sample.loss_mask] for sample in batch.samples])
    labels = torch.from_numpy(labels_of(tokens))
    right = torch.sigmoid(scores)
    terms = -labels * torch.log(right) - (1 - labels) * torch.log(1 - right)
    same = (right > 0.5) == (labels > 0.5)
    return {"loss": terms.mean(), "accuracy": same.float().mean(), "labels": labels.mean()}


def _alone(loss: Loss) -> Callable[[Path], Loss]:
    """Return the plain loss of a job that compares with no other role."""
    return lambda other: loss


PAIRED: dict[str, Any] = {"batches": PAIR_BATCHES, "sparse": ONE_PAIR}
JOBS = {
    "sft": Job(_imitate, _alone(sft_loss)),
    "policy": Job(_sample, _alone(policy_loss)),
    "value": Job(_estimate, _alone(value_loss), "value"),
    "dpo": Job(_prefer, PlainDpo, other="reference", **PAIRED),
    "simpo": Job(_prefer_alone, _alone(plain_simpo), **PAIRED),
    "kto": Job(_rate, plain_feedback, other="reference", **PAIRED),
    "rm": Job(_reward, _alone(plain_rewards), "value", **PAIRED),
    "prm": Job(_reward_steps, _alone(plain_process), "value"),
    "distill": Job(_distil, PlainDistillation, other="teacher"),
}
