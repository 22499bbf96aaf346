"""What the tests of distillation make every rank do, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from engine_cases import RATES, Batch, Setting, own_packs
from engine_reference import Metrics, plain_policy
from torch import Tensor

from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole
from plimsoll.records import Sample
from plimsoll.trainer.objectives import DistillationObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig

TEMPERATURE, SHARE = 2.0, 0.3
OBJECTIVE = DistillationObjective(Choice(name="reverse_kl"), TEMPERATURE, SHARE)


@dataclass(frozen=True)
class Case:
    """How a student learns, and how its teacher is kept."""

    setting: Setting
    teacher: Path
    stage: Literal[0, 3] = 0
    offload: Literal["none", "cpu"] = "none"

    def frozen(self) -> FrozenRole:
        model = self.setting.role(self.teacher).model
        return FrozenRole(model=model).with_engine(
            FrozenZeroConfig(stage=self.stage, offload=self.offload)
        )


def train_student(
    place: Place, model: Path, case: Case, batches: Sequence[Batch], out: Path
) -> list[UpdateResult]:
    """Train on the batches, one step each; save a checkpoint and the model."""
    worker = Worker(place)
    worker.load_model("actor", case.setting.role(model), temperature=1.0)
    worker.load_model("teacher", case.frozen(), head="states")
    results = []
    for batch, rate in zip(batches, RATES, strict=True):
        packs = own_packs(place, batch, case.setting.micro_batch_tokens)
        worker.teacher_forward("teacher", packs)
        measured = worker.measure_distillation("actor", packs, batch.counts, OBJECTIVE)
        results.append(worker.train("actor", packs, None, batch.counts, OBJECTIVE, rate))
        assert measured == results[-1].metrics  # the same, without gradients
    worker.save_checkpoint("actor", out / "checkpoint")
    worker.save_model("actor", out / "model")
    return results


@dataclass(frozen=True)
class PlainDistillation:
    """`OBJECTIVE`, sequence by sequence, with all logits of both models."""

    teacher: Path

    def __call__(self, model: Any, batch: Batch) -> Metrics:
        teacher = plain_policy(self.teacher)
        divergences, nlls = [], []
        for sample in batch.samples:
            with torch.no_grad():
                teacher_LV = learned_logits(teacher, sample)
            student_LV = learned_logits(model, sample)
            q, p = (x.div(TEMPERATURE).softmax(-1) for x in (student_LV, teacher_LV))
            divergences.append((q * (q.log() - p.log())).sum(-1))
            targets = torch.from_numpy(sample.tokens[sample.loss_mask])
            nlls.append(torch.nn.functional.cross_entropy(student_LV, targets, reduction="none"))
        divergence, nll = torch.cat(divergences).mean(), torch.cat(nlls).mean()
        loss = (1 - SHARE) * TEMPERATURE**2 * divergence + SHARE * nll
        return {"loss": loss, "divergence": divergence, "nll": nll}


def learned_logits(model: Any, sample: Sample) -> Tensor:
    """Return the logits that predict the sample's learned tokens."""
    tokens = torch.from_numpy(sample.tokens)
    logits_TV: Tensor = model(tokens[None], use_cache=False).logits[0, :-1].float()
    return logits_TV[torch.from_numpy(sample.loss_mask[1:])]
