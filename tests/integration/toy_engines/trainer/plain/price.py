"""The engine's memory."""

from __future__ import annotations

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.shapes.shape import ModelShape
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Tensors
from plimsoll.trainer.price import RoleWork, SavedBytes, TrainedTensors, TrainerPrice

_SOURCE = "trainer/plain/engine.py"


def _weights(shape: ModelShape, element: int) -> Tensors:
    return Tensors("weights", "plain weights", "parameters", shape.parameters, element, _SOURCE)


def _trained(role: TrainedRole, own: RoleWork, sending: Sending | None) -> TrainedTensors:
    count, element = own.shape.parameters, role.model.element
    kept = (
        _weights(own.shape, element),
        Tensors("gradients", "plain gradients", "parameters", count, element, _SOURCE),
        Tensors(
            "optimizer states", "plain momentum", "parameters", count, element, _SOURCE,
            life="stepped",
        ),
    )  # fmt: skip
    return TrainedTensors(kept, layers_left=0)


def _frozen(role: FrozenRole, own: RoleWork) -> tuple[Tensors, ...]:
    return (_weights(own.shape, role.model.element),)


PRICE = TrainerPrice(
    trained=_trained,
    frozen=_frozen,
    saved=lambda role: SavedBytes(masters=role.model.element, moments=0, average=0),
)
