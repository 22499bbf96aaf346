"""The memory levers of ZeRO: tensors are divided over ranks, moved to the host, or narrowed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from plimsoll.config.cluster import RankSleep
from plimsoll.config.problems import CROWDED
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.items import Kind
from plimsoll.timeline.levers import Lever, Move, Relief, Situation, has_cards
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.rules import LOST_BELOW

_STAGE = "zero.stage"
_GRADIENTS = "zero.gradient_dtype"
_STATES = "zero.state_dtype"
_HELD: tuple[Kind, ...] = ("weights", "gradients", "optimizer states", "buffers")
_ASLEEP: tuple[Kind, ...] = (*_HELD, "frozen models")


def _zero(at: Situation) -> ZeroConfig:
    return at.trained.settings_of(ZeroConfig)


def _is_wide(at: Situation) -> bool:
    return _zero(at).stage > 0 and at.trained.model.dtype == "bfloat16"


def _narrow_states(at: Situation) -> Sequence[Move]:
    """Return the move to states in bfloat16; none if the learning rate is too low for them."""
    if not _is_wide(at) or at.trained.optimizer.learning_rate < LOST_BELOW:
        return ()
    return [{_STATES: "bfloat16", _STAGE: max(2, _zero(at).stage)}]


def _can_sleep(spec: RunSpec[Any]) -> bool:
    """Return whether the ranks' cards are used by engines that sleep while the ranks train."""
    engines = spec.engines
    shared = engines is not None and engines.placement == "shared" and engines.engine.sleeps
    return shared and has_cards(spec)


def _depths_besides(at: Situation) -> tuple[Sequence[Move], Sequence[Move]]:
    """Return the moves to less sleep, and those to more, the nearest first."""
    moves = [{"cluster.rank_sleep": depth} for depth in get_args(RankSleep)]
    place = moves.index({"cluster.rank_sleep": at.spec.rank_sleep})
    return moves[:place][::-1], moves[place + 1 :]


_trained_lever = partial(Lever, scope="trained", engine=ZeroConfig)
_frozen_lever = partial(Lever, scope="frozen", engine=FrozenZeroConfig)

LEVERS: tuple[Lever, ...] = (
    _trained_lever(
        keys=(_STAGE,),
        words="states divided over the ranks",
        cost="stage 3 gathers weights for each micro-batch, stages below it do not",
        rank=20,
        settings=lambda at: [{_STAGE: stage} for stage in (2, 3) if stage > _zero(at).stage],
        reliefs=(Relief(_HELD),),
        control=True,
    ),
    _frozen_lever(
        keys=(_STAGE,),
        words="models that only score divided over the ranks",
        cost="a divided model is gathered for each micro-batch",
        rank=20,
        settings=lambda at: [{_STAGE: 3}] if at.spec.ranks_of(at.role) > 1 else (),
        reliefs=(Relief(("frozen models",)),),
        control=True,
    ),
    _frozen_lever(
        keys=("zero.offload",),
        words="models that only score on the cards",
        cost="a model that only scores stays on the cards",
        rank=20,
        settings=lambda at: [{"zero.offload": "none"}],
        reliefs=(Relief(("frozen models",), where=("host",)),),
    ),
    Lever(
        keys=("cluster.rank_sleep",),
        words="ranks that sleep while the engines sample",
        cost="what sleeps crosses PCIe twice in each step, and is in host memory",
        rank=25,
        settings=lambda at: _depths_besides(at)[1],
        reliefs=(Relief(_ASLEEP, where=("device",), phases=("load", "rollout", "sync", "save")),),
        applies=_can_sleep,
        codes=CROWDED,
        control=True,
    ),
    Lever(
        keys=("cluster.rank_sleep",),
        words="ranks that stay on their cards",
        cost="engines have only the memory that ranks leave of a card",
        rank=25,
        settings=lambda at: _depths_besides(at)[0],
        reliefs=(Relief(_ASLEEP, where=("host",)),),
        applies=_can_sleep,
    ),
    _trained_lever(
        keys=("zero.optimizer_offload",),
        words="optimizer states in host memory",
        cost="on the CPU, Adam is bound by host memory and PCIe",
        rank=30,
        settings=lambda at: [{"zero.optimizer_offload": "cpu", _STAGE: max(1, _zero(at).stage)}],
        reliefs=(Relief(("gradients", "optimizer states"), where=("device",)),),
        applies=has_cards,
        control=True,
    ),
    _frozen_lever(
        keys=("zero.offload",),
        words="models that only score in host memory",
        cost="an offloaded model's weights cross PCIe when it scores",
        rank=30,
        settings=lambda at: [{"zero.offload": "cpu"}],
        reliefs=(Relief(("frozen models",), where=("device",)),),
        applies=has_cards,
        control=True,
    ),
    _trained_lever(
        keys=("zero.parameter_offload",),
        words="weights in host memory",
        cost="offloaded weights cross PCIe in each forward and backward pass",
        rank=30,
        settings=lambda at: [{"zero.parameter_offload": "cpu", _STAGE: 3}],
        reliefs=(Relief(("weights",), where=("device",)),),
        applies=has_cards,
        control=True,
    ),
    _trained_lever(
        keys=(_GRADIENTS,),
        words="gradients in bfloat16",
        cost="sums in bfloat16 lose small gradients over many micro-batches",
        rank=50,
        effect="rounding",
        settings=lambda at: [{_GRADIENTS: "bfloat16"}] if _is_wide(at) else (),
        reliefs=(Relief(("gradients", "buffers")),),
    ),
    _trained_lever(
        keys=(_STATES,),
        words="masters and moments in bfloat16",
        cost="updates below 1/512 of a weight are rounded away",
        rank=50,
        effect="rounding",
        settings=_narrow_states,
        reliefs=(Relief(("optimizer states", "gradients")),),
    ),
)
