"""Items of memory, the moments at which each exists, and the place where it lies.

A moment has two names. A *phase* is an interval of a step (load, rollout, score, train_critic,
train_actor, sync, save), or comes before the first step (precompute). Within a phase memory rises
and falls at a few *instants* (`forward_backward`, `step`, ...). A peak is the maximum over
instants, never a sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plimsoll.resolve.run_spec import Phase

Where = Literal["device", "host", "disk"]

Level = Literal["allocated", "reserved", "process"]
"""The smallest measure that includes an item.

On a device: `allocated` is torch's allocated bytes, `reserved` the allocator's gap above them,
`process` all other bytes that the device reports as used (CUDA context, communicators, vLLM's
share). On a host: `allocated` is tensors, `process` all other memory of a process (interpreter,
libraries, thread pools, caches).
"""


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
"""The kind of an item, for drawings and for advice.

`activations` belong to any role. `weights`, `gradients`, `optimizer states` and `buffers` belong to
trained roles; `frozen models` is everything else of the other roles.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Moment:
    """An instant of a phase, such as Moment("train_actor", "step")."""

    phase: Phase
    instant: str

    def __str__(self) -> str:
        return f"{self.phase} ({self.instant})"


@dataclass(frozen=True)
class Item:
    """Some bytes of one process.

    Attributes:
        role: the owner (`actor`, `critic`, `reference`, `reward`, `teacher`, `rollout`), or
            `process` for bytes without a role (CUDA context, interpreter, communicators).
        kind: the kind, by which items are added up.
        name: a description for display, such as `fp32 masters`, `moments`, `activations`.
        where: the place of the bytes.
        level: the smallest measure that includes them.
        bytes: the size, never negative.
        formula: the calculation in words and numbers, such as "2 bytes x 7,615,616,512 parameters /
            8 ranks".
        source: the origin of the formula: a paper, a file of a project, a measurement.
        cache: whether it is an engine's KV cache, which takes the memory that is left.
    """

    role: str
    kind: Kind
    name: str
    where: Where
    level: Level
    bytes: int
    formula: str
    source: str
    cache: bool = False

    def __post_init__(self) -> None:
        assert self.bytes >= 0, self


@dataclass(frozen=True)
class Allocation:
    """An item and the moments at which it exists."""

    item: Item
    moments: frozenset[Moment]
