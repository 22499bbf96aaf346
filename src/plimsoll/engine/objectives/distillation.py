"""The objective of a student: a divergence from its teacher, and its likelihood of the data."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.choice import divergence
from plimsoll.algorithm.inputs import LossOutput
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.engine.teacher_forward import TeacherForward
from plimsoll.model.distillation import Distilled, Lesson
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts


@dataclass(frozen=True)
class DistillationObjective:
    """See `Lesson` for the temperature and the share."""

    divergence: Choice
    temperature: float
    nll_share: float

    def loss(
        self, engine: Engine, pack: PackTensors, stream: TeacherForward, counts: BatchCounts
    ) -> LossOutput:
        device = pack.tokens_T.device
        with stream.head(device) as (weight_VH, bias_V):
            lesson = Lesson(
                hidden_L_H=stream.hidden_L_H.to(device),
                weight_VH=weight_VH,
                bias_V=bias_V,
                form=stream.model.form,
                divergence=divergence(self.divergence),
                temperature=self.temperature,
                nll_share=self.nll_share,
                tokens=counts.tokens,
            )
            found = Distilled(*engine.forward(pack, lesson=lesson))
        return LossOutput(found.loss, {"divergence": found.divergence, "nll": found.nll})
