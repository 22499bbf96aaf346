"""What the plan is made of: items of memory, the moments at which each exists, and where it is.

Two levels of naming. A *phase* is an interval of a step (load, rollout, score, train_critic,
train_actor, sync, save), or comes before the first (precompute). Within a phase memory rises and
falls at a few *instants* (`forward_backward`, `step`, ...); a peak is the maximum over instants,
never a sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plimsoll.spec.run_spec import Phase

Where = Literal["device", "host", "disk"]

Level = Literal["allocated", "reserved", "process"]
"""Which measure an item first shows in. On a device: `allocated` is in torch's allocated bytes,
`reserved` is the allocator's gap above them, `process` is what the device shows as used besides
(CUDA context, communicators, vLLM's share). On a host: `allocated` is tensors, `process` all else
that a process holds (interpreter, libraries, thread pools, caches)."""


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
"""What an item is, for drawings, and for saying what would have to go. `activations` are of every
role, `weights` to `buffers` else of trained ones, and `frozen models` is all else of the others.
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

    role: whose (`actor`, `critic`, `reference`, `reward`, `teacher`, `rollout`), or `process` for
        what no role owns (CUDA context, interpreter, communicators).
    name: what, in words that are only shown, such as `fp32 masters`, `moments`, `activations`.
    bytes: whole bytes, never negative.
    formula: in words with the numbers put in, such as
        "2 bytes x 7,615,616,512 parameters / 8 ranks".
    source: where the formula is from: a paper, a file of a project, a measurement.
    cache: it is an engine's KV cache, which has what is left.
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
