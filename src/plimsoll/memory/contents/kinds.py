"""The kinds of items, for drawings, and for saying what would have to go."""

from __future__ import annotations

from typing import Literal, get_args

from plimsoll.memory.items import Item

Kind = Literal[
    "weights",
    "gradients",
    "optimizer states",
    "activations",
    "buffers",
    "frozen models",
    "rollout engines",
    "processes",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_WORDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("activations", ("activations", "working set", "inputs", "input ids", "logits", "masks")),
    (
        "buffers",
        ("copy", "copies", "bucket", "buffer", "gathered", "live", "incoming", "to save", "file"),
    ),
    ("optimizer states", ("masters", "moments")),
    ("gradients", ("gradient",)),
)


def kind_of(item: Item) -> Kind:
    """Told by role and name."""
    if item.role == "rollout":
        return "rollout engines"
    if item.role == "process":
        return "processes"
    kinds = (kind for kind, words in _WORDS if any(word in item.name for word in words))
    kind: Kind = next(kinds, "weights")
    frozen = item.role in ("reference", "reward", "teacher") and kind != "activations"
    return "frozen models" if frozen else kind
