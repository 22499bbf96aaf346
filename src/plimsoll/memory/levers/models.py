"""The memory levers of models.

They change the activations that a forward keeps for its backward pass, the number of weights that
learn, and the bits of weights and moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from plimsoll.memory.levers.changes import Change, apply_changes
from plimsoll.resolve.run_spec import Phase
from plimsoll.timeline.items import Kind
from plimsoll.timeline.levers import Lever, Move, Relief, Situation, has_cards

_CHUNK = "model.head_chunk"
_CHECKPOINTING = "model.gradient_checkpointing"
_EVERY = "model.checkpoint_every"
_INPUTS = "model.activation_offload"
_MOMENTS = "optimizer.kind"
_ADAPTER = "adapter.rank"
_QUANTIZATION = "model.quantization"

_SMALL = 256
"""Rows of logits at once: fewer save little more."""
_ADAPTER_RANK = 16
_BACKWARD: tuple[Phase, ...] = ("train_actor", "train_critic")
"""The phases with a backward pass: only there are activations kept for it."""


def _more_checkpointing(at: Situation) -> Sequence[Move]:
    """Return moves that checkpoint more layers, and more of each layer."""
    ways = (True,) if at.trained.model.gradient_checkpointing else ("selective", True)
    return [{_CHECKPOINTING: way, _EVERY: 1} for way in ways]


def _narrow_moments(at: Situation) -> Sequence[Move]:
    """Return the move to moments of 8 bits; nothing if the role's engine does not support them."""
    key, before, narrow = at.spec.roles[at.role].key, at.trained.optimizer.kind, "adamw_8bit"
    spec = apply_changes(at.spec, [Change(f"{key}.{_MOMENTS}", before, narrow)])
    return () if spec is None else [{_MOMENTS: narrow}]


def _quantised_base(at: Situation) -> Sequence[Move]:
    rank = at.trained.adapter.rank if at.trained.adapter else _ADAPTER_RANK
    return [{_QUANTIZATION: "nf4", _ADAPTER: rank}]


_STATES: tuple[Kind, ...] = ("gradients", "optimizer states", "buffers")

_trained_lever = partial(Lever, turns="trained")

LEVERS: tuple[Lever, ...] = (
    _trained_lever(
        keys=(_CHUNK,),
        words="smaller pieces of logits",
        cost="logits come in smaller pieces: the same loss",
        rank=10,
        settings=lambda at: [{_CHUNK: _SMALL}] if at.trained.model.head_chunk > _SMALL else (),
        reliefs=(Relief(("activations",)),),
    ),
    _trained_lever(
        keys=(_CHECKPOINTING, _EVERY),
        words="gradient checkpointing",
        cost="checkpointed layers are computed twice; "
        "with selective, only what is element by element",
        rank=20,
        settings=_more_checkpointing,
        reliefs=(Relief(("activations",), phases=_BACKWARD),),
        control=True,
    ),
    _trained_lever(
        keys=(_INPUTS,),
        words="inputs of checkpointed layers in host memory",
        cost="offloaded layer inputs cross PCIe in each forward and backward pass",
        rank=30,
        settings=lambda at: [{_INPUTS: "cpu"}] if at.trained.model.gradient_checkpointing else (),
        reliefs=(Relief(("activations",), where=("device",), phases=_BACKWARD),),
        applies=has_cards,
        control=True,
    ),
    _trained_lever(
        keys=(_MOMENTS,),
        words="moments of 8 bits",
        cost="moments in 8 bits are rounded to 256 values in each block",
        rank=50,
        effect="rounding",
        settings=_narrow_moments,
        reliefs=(Relief(("optimizer states",)),),
    ),
    _trained_lever(
        keys=(_ADAPTER,),
        words="adapters",
        cost="only adapters of a small part of the size learn, and may learn less",
        rank=60,
        effect="adapters",
        settings=lambda at: () if at.trained.adapter else [{_ADAPTER: _ADAPTER_RANK}],
        reliefs=(Relief((*_STATES, "frozen models", "rollout engines")),),
        control=True,
    ),
    _trained_lever(
        keys=(_QUANTIZATION,),
        words="adapters on bases of 4 bits",
        cost="a base in 4 bits answers a little differently, and is unpacked at each use",
        rank=70,
        effect="adapters",
        settings=_quantised_base,
        reliefs=(Relief((*_STATES, "weights")),),
        control=True,
    ),
)
