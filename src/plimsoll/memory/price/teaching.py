"""What a teacher leaves for its student on a rank: hidden states, and its head where that is not
there already.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.deepspeed import Device
from plimsoll.config.engine import FrozenRole
from plimsoll.memory.items import Held, Item, Moment
from plimsoll.shapes.shape import ModelShape

_SOURCE = "engine/teaching.py"
_COMPARED = frozenset({Moment("train_actor", "forward_backward"), Moment("score", "forward")})


def teaching_items(
    teacher: FrozenRole,
    shape: ModelShape,
    tokens: int,
    ranks: int,
    device: Device,
    moments: frozenset[Moment],
) -> Iterator[Held]:
    """tokens: of a step, on one rank. moments: all of the job's."""
    element = teacher.model.element
    states = Item(
        "teacher",
        "hidden states",
        "host",
        "allocated",
        element * tokens * shape.hidden,
        f"{element} bytes x {tokens:,} tokens of a step x {shape.hidden:,}",
        _SOURCE,
    )
    yield Held(states, frozenset(moment for moment in moments if moment.phase != "load"))
    divided = teacher.stage == 3 and ranks > 1
    if divided or (teacher.offload == "cpu" and device == "cuda"):
        head = Item(
            "teacher",
            "gathered head",
            "device",
            "allocated",
            element * shape.vocabulary * shape.hidden,
            f"{element} bytes x {shape.vocabulary:,} of the vocabulary x {shape.hidden:,}",
            _SOURCE,
        )
        yield Held(head, moments & _COMPARED)
