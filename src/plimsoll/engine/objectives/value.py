"""The critic's objective: the clipped squared error of the value before every learned token."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.algorithm.inputs import LossOutput, ValueLossInputs
from plimsoll.algorithm.value_loss import value_loss
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats


@dataclass(frozen=True)
class ValueStream:
    """One number per learned token, in packed order."""

    returns_L: Floats
    old_values_L: Floats


@dataclass(frozen=True)
class ValueObjective:
    """clip: how far a value may move in one step; None: as far as it likes."""

    clip: float | None

    def loss(
        self, engine: Engine, pack: PackTensors, stream: ValueStream, counts: BatchCounts
    ) -> LossOutput:
        values_L = engine.forward(pack)
        device = values_L.device
        inputs = ValueLossInputs(
            values_L=values_L,
            old_values_L=sent(stream.old_values_L, device),
            returns_L=sent(stream.returns_L, device),
            counts=counts,
        )
        return value_loss(inputs, self.clip)
