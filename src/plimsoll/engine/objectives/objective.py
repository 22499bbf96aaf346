"""What every objective offers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.engine.protocol import Engine
from plimsoll.model.attention import sent
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Bools, Floats

StreamT = TypeVar("StreamT", contravariant=True)


class Objective(Protocol[StreamT]):
    """A loss with all that is the same for every micro-batch of a step."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: StreamT, counts: BatchCounts
    ) -> LossOutput:
        """The micro-batch's share of the loss; counts: of the whole step, over all ranks."""
        ...


def as_tensor(array: Floats | Bools, like: Tensor) -> Tensor:
    """A stream's array (maybe a read-only view of Ray's store) on the device of the micro-batch."""
    return sent(array, like.device)
