"""The memory levers of ZeRO: what ranks divide, what waits in host memory, and in which numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.engine.zero.rules import LOST_BELOW
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.levers import Lever, Move, Situation, relief

_STAGE = "zero.stage"
_OPTIMIZER = "zero.optimizer_offload"
_WEIGHTS = "zero.parameter_offload"
_GRADIENTS = "zero.gradient_dtype"
_STATES = "zero.state_dtype"
_FROZEN_OFFLOAD = "zero.offload"


def _zero(at: Situation) -> ZeroConfig:
    return at.trained.settings_of(ZeroConfig)


def _stages(at: Situation) -> Sequence[Move]:
    return [{_STAGE: stage} for stage in (2, 3) if stage > _zero(at).stage]


def _optimizer_on_host(at: Situation) -> Sequence[Move]:
    return [{_OPTIMIZER: "cpu", _STAGE: max(1, _zero(at).stage)}]


def _weights_on_host(at: Situation) -> Sequence[Move]:
    return [{_WEIGHTS: "cpu", _STAGE: 3}]


def _is_wide(at: Situation) -> bool:
    return _zero(at).stage > 0 and at.trained.model.dtype == "bfloat16"


def _narrow_gradients(at: Situation) -> Sequence[Move]:
    return [{_GRADIENTS: "bfloat16"}] if _is_wide(at) else ()


def _narrow_states(at: Situation) -> Sequence[Move]:
    """Return nothing if the learning rate is one whose updates bfloat16 would lose."""
    if not _is_wide(at) or at.trained.optimizer.learning_rate < LOST_BELOW:
        return ()
    return [{_STATES: "bfloat16", _STAGE: max(2, _zero(at).stage)}]


def _divided_models(at: Situation) -> Sequence[Move]:
    return [{_STAGE: 3}] if at.spec.ranks_of(at.role) > 1 else ()


def _has_cards(spec: RunSpec[Any]) -> bool:
    return spec.cluster.device != "cpu"


DIVIDED_STATES = Lever(
    keys=(_STAGE,),
    words="states divided over the ranks",
    cost="stage 3 gathers weights for each micro-batch, stages below it do not",
    rank=20,
    settings=_stages,
    reliefs=(relief("weights", "gradients", "optimizer states", "buffers"),),
    turns="trained",
    engine=ZeroConfig,
    control=True,
)
OPTIMIZER_ON_HOST = Lever(
    keys=(_OPTIMIZER,),
    words="optimizer states in host memory",
    cost="on the CPU, Adam is bound by host memory and PCIe",
    rank=30,
    settings=_optimizer_on_host,
    reliefs=(relief("gradients", "optimizer states", where=["device"]),),
    turns="trained",
    engine=ZeroConfig,
    applies=_has_cards,
    control=True,
)
WEIGHTS_ON_HOST = Lever(
    keys=(_WEIGHTS,),
    words="weights in host memory",
    cost="offloaded weights cross PCIe in each forward and backward pass",
    rank=30,
    settings=_weights_on_host,
    reliefs=(relief("weights", where=["device"]),),
    turns="trained",
    engine=ZeroConfig,
    applies=_has_cards,
    control=True,
)
NARROW_GRADIENTS = Lever(
    keys=(_GRADIENTS,),
    words="gradients in bfloat16",
    cost="sums in bfloat16 lose small gradients over many micro-batches",
    rank=50,
    effect="rounding",
    settings=_narrow_gradients,
    reliefs=(relief("gradients", "buffers"),),
    turns="trained",
    engine=ZeroConfig,
)
NARROW_STATES = Lever(
    keys=(_STATES,),
    words="masters and moments in bfloat16",
    cost="updates below 1/512 of a weight are rounded away",
    rank=50,
    effect="rounding",
    settings=_narrow_states,
    reliefs=(relief("optimizer states", "gradients"),),
    turns="trained",
    engine=ZeroConfig,
)
DIVIDED_MODEL = Lever(
    keys=(_STAGE,),
    words="models that only score divided over the ranks",
    cost="a divided model is gathered for each micro-batch",
    rank=20,
    settings=_divided_models,
    reliefs=(relief("frozen models"),),
    turns="frozen",
    engine=FrozenZeroConfig,
    control=True,
)
MODEL_ON_HOST = Lever(
    keys=(_FROZEN_OFFLOAD,),
    words="models that only score in host memory",
    cost="an offloaded model's weights cross PCIe when it scores",
    rank=30,
    settings=lambda at: [{_FROZEN_OFFLOAD: "cpu"}],
    reliefs=(relief("frozen models", where=["device"]),),
    turns="frozen",
    engine=FrozenZeroConfig,
    applies=_has_cards,
    control=True,
)
MODEL_ON_CARD = Lever(
    keys=(_FROZEN_OFFLOAD,),
    words="models that only score on the cards",
    cost="a model that only scores stays on the cards",
    rank=20,
    settings=lambda at: [{_FROZEN_OFFLOAD: "none"}],
    reliefs=(relief("frozen models", where=["host"]),),
    turns="frozen",
    engine=FrozenZeroConfig,
)

LEVERS: tuple[Lever, ...] = (
    DIVIDED_STATES,
    DIVIDED_MODEL,
    MODEL_ON_CARD,
    OPTIMIZER_ON_HOST,
    MODEL_ON_HOST,
    WEIGHTS_ON_HOST,
    NARROW_GRADIENTS,
    NARROW_STATES,
)
