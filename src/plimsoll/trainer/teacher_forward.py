"""A teacher on a rank: its hidden states for a step's packs, and its head for the student.

The teacher reads all packs of a step before the student learns from the first, so that an offloaded
teacher is moved to the device once a step. The hidden states wait in host memory; the logits are
computed chunk by chunk when they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.model.policy import PackTensors, TeacherModel
from plimsoll.model.sending import keep_on_host
from plimsoll.records import Pack
from plimsoll.trainer.protocol import Engine


@dataclass(frozen=True)
class TeacherForward:
    """A teacher's output for one micro-batch.

    Attributes:
        hidden_L_H: The hidden states that are the head's input, in host memory. A card may still be
            writing them; see `keep_on_host`.
        teacher: The teacher's engine.
    """

    hidden_L_H: Tensor
    teacher: Engine

    @property
    def model(self) -> TeacherModel:
        """The teacher's model; use `head` to read the head's weights."""
        assert isinstance(self.teacher.module, TeacherModel)
        return self.teacher.module

    @contextmanager
    def head(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the head's undivided weight and bias (None without one) on the device."""
        names = self.model.head_names()
        with self.teacher.gather(names) as tensors:
            weight, *bias = (tensors[name].to(device, non_blocking=True) for name in names)
            yield weight, bias[0] if bias else None


def teacher_forward(
    teacher: Engine, packs: Iterable[Pack], device: torch.device
) -> list[TeacherForward]:
    """Return the teacher's hidden states for each pack."""
    with teacher.scoring():
        states = [
            keep_on_host(teacher.forward(PackTensors.from_pack(pack, device))) for pack in packs
        ]
    return [TeacherForward(hidden_L_H, teacher) for hidden_L_H in states]
