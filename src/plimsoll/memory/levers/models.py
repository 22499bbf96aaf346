"""The memory levers of models.

They change the activations that a forward keeps for its backward pass, the number of weights that
learn, and the bits of weights and moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.memory.levers.changes import Change, apply_changes
from plimsoll.spec.run_spec import Phase
from plimsoll.timeline.items import Kind
from plimsoll.timeline.levers import Lever, Move, Situation, relief

_CHUNK = "model.head_chunk"
_CHECKPOINTING = "model.gradient_checkpointing"
_EVERY = "model.checkpoint_every"
_INPUTS = "model.activation_offload"
_MOMENTS = "optimizer.kind"
_ADAPTER = "adapter.rank"
_QUANTIZATION = "model.quantization"

_SMALL_CHUNK = 256
"""Rows of logits at once: fewer save little more."""
_ADAPTER_RANK = 16
_BACKWARD: tuple[Phase, ...] = ("train_actor", "train_critic")
"""The phases with a backward pass: only there are activations kept for it."""


def _small_chunks(at: Situation) -> Sequence[Move]:
    return [{_CHUNK: _SMALL_CHUNK}] if at.trained.model.head_chunk > _SMALL_CHUNK else ()


def _more_checkpointing(at: Situation) -> Sequence[Move]:
    """Return moves that checkpoint more layers, and more of each layer."""
    model = at.trained.model
    ways: dict[object, list[Move]] = {
        False: [{_CHECKPOINTING: "selective"}, {_CHECKPOINTING: True}],
        "selective": [{_CHECKPOINTING: True}],
        True: [],
    }
    made = [{**way, _EVERY: 1} for way in ways[model.gradient_checkpointing]]
    return made if made or model.checkpoint_every == 1 else [{_EVERY: 1}]


def _inputs_on_host(at: Situation) -> Sequence[Move]:
    return [{_INPUTS: "cpu"}] if at.trained.model.gradient_checkpointing else ()


def _narrow_moments(at: Situation) -> Sequence[Move]:
    """Return the move to moments of 8 bits; nothing if the role's engine does not support them."""
    key, before, narrow = at.spec.roles[at.role].key, at.trained.optimizer.kind, "adamw_8bit"
    spec = apply_changes(at.spec, [Change(f"{key}.{_MOMENTS}", before, narrow)])
    return () if spec is None else [{_MOMENTS: narrow}]


def _with_adapter(at: Situation) -> Sequence[Move]:
    return [{_ADAPTER: _ADAPTER_RANK}] if at.trained.adapter is None else ()


def _quantised_base(at: Situation) -> Sequence[Move]:
    rank = at.trained.adapter.rank if at.trained.adapter else _ADAPTER_RANK
    return [{_QUANTIZATION: "nf4", _ADAPTER: rank}]


_STATES: tuple[Kind, ...] = ("gradients", "optimizer states", "buffers")

SMALL_CHUNKS = Lever(
    keys=(_CHUNK,),
    words="smaller pieces of logits",
    cost="logits come in smaller pieces: the same loss",
    rank=10,
    settings=_small_chunks,
    reliefs=(relief("activations"),),
    turns="trained",
)
CHECKPOINTING = Lever(
    keys=(_CHECKPOINTING, _EVERY),
    words="gradient checkpointing",
    cost="checkpointed layers are computed twice; with selective, only what is element by element",
    rank=20,
    settings=_more_checkpointing,
    reliefs=(relief("activations", phases=_BACKWARD),),
    turns="trained",
    control=True,
)
INPUTS_ON_HOST = Lever(
    keys=(_INPUTS,),
    words="inputs of checkpointed layers in host memory",
    cost="offloaded layer inputs cross PCIe in each forward and backward pass",
    rank=30,
    settings=_inputs_on_host,
    reliefs=(relief("activations", where=["device"], phases=_BACKWARD),),
    turns="trained",
    applies=lambda spec: spec.cluster.device != "cpu",
    control=True,
)
NARROW_MOMENTS = Lever(
    keys=(_MOMENTS,),
    words="moments of 8 bits",
    cost="moments in 8 bits are rounded to 256 values in each block",
    rank=50,
    effect="rounding",
    settings=_narrow_moments,
    reliefs=(relief("optimizer states"),),
    turns="trained",
)
ADAPTERS = Lever(
    keys=(_ADAPTER,),
    words="adapters",
    cost="only adapters of a small part of the size learn, and may learn less",
    rank=60,
    effect="adapters",
    settings=_with_adapter,
    reliefs=(relief(*_STATES, "frozen models", "rollout engines"),),
    turns="trained",
    control=True,
)
QUANTISED_BASES = Lever(
    keys=(_QUANTIZATION,),
    words="adapters on bases of 4 bits",
    cost="a base in 4 bits answers a little differently, and is unpacked at each use",
    rank=70,
    effect="adapters",
    settings=_quantised_base,
    reliefs=(relief(*_STATES, "weights"),),
    turns="trained",
    control=True,
)

LEVERS: tuple[Lever, ...] = (
    SMALL_CHUNKS,
    CHECKPOINTING,
    INPUTS_ON_HOST,
    NARROW_MOMENTS,
    ADAPTERS,
    QUANTISED_BASES,
)
