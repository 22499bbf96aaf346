"""Items of memory, the moments at which each exists, and the place where it lies.

A moment has two names. A *phase* is an interval of a step (load, rollout, score, train_critic,
train_actor, sync, save), or comes before the first step (precompute). Within a phase memory rises
and falls at a few *instants* (`forward_backward`, `step`, ...). A peak is the maximum over
instants, never a sum over them.

Ranks and engines on the same cards take turns. Ranks sleep while engines sample and are
synchronised, and while a checkpoint is written from their copies in host memory; then only the
actor's weights are awake in a sync. Engines sleep while ranks load, score and train, and while the
final model is gathered.

`Tensors` are tensors of one kind that a role keeps on one rank, in any framework. Their lifetime
says at which instants of a job's phases they exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from plimsoll.config.cluster import RankSleep
from plimsoll.resolve.roles import Role, TrainPhase
from plimsoll.resolve.run_spec import PHASES, Phase

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
    """An instant of a phase, such as Moment("train_actor", "step").

    Attributes:
        order: at a moment of loading a role, the role's place in the order of loading.
    """

    phase: Phase
    instant: str
    order: int = 0

    def __str__(self) -> str:
        return f"{self.phase} ({self.instant})"


@dataclass(frozen=True)
class Item:
    """Some bytes of one process.

    Attributes:
        role: the name of the owner: a role, `rollout` for an engine, or `process` for bytes without
            either (CUDA context, interpreter, communicators).
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


_APART = frozenset({Moment("rollout", "generate"), Moment("save", "write")})
_SYNC = frozenset({Moment("sync", "gather"), Moment("sync", "forward")})


def states_asleep(depth: RankSleep) -> frozenset[Moment]:
    """Return the moments at which ranks have no states on their cards."""
    return frozenset() if depth == "none" else _APART | _SYNC


def weights_asleep(depth: RankSleep, role: Role) -> frozenset[Moment]:
    """Return the moments at which ranks have no weights of a role on their cards."""
    if depth != "all":
        return frozenset()
    return _APART if role.sends else _APART | _SYNC


def is_for_ranks(moment: Moment) -> bool:
    """Return whether it is a moment of load or save at which engines sleep for ranks that sleep.

    Engines start before the ranks read their models, and sleep from then on.
    """
    is_loading = moment.phase == "load" and moment.instant.split()[0] in ("read", "build")
    return is_loading or moment == Moment("save", "gather")


INSTANTS: dict[Phase, tuple[str, ...]] = {
    "precompute": ("read", "build", "forward"),
    "rollout": ("generate",),
    "score": ("forward",),
    "train_critic": ("forward_backward", "backward", "reduce", "norm", "step"),
    "train_actor": ("forward_backward", "backward", "reduce", "norm", "step"),
    "sync": ("gather", "forward"),
    "save": ("gather", "write"),
}
"""The instants of each phase, in order. `load` has two for each role, in the order of loading."""

Life = Literal[
    "always",
    "built",
    "stepped",
    "loading",
    "building",
    "scoring",
    "computing",
    "backward",
    "reducing",
    "training",
    "norming",
    "stepping",
    "sending",
    "saving",
    "writing",
]
"""The lifetime of a tensor.

- always: from the moment the role is loaded.
- built: from the moment the role's engine is built, after the role was read.
- stepped: from the first optimizer step.
- loading: while the role is read.
- building: while the role's engine is built.
- scoring: while the role scores; if it sends its weights, also while a sync is verified.
- computing: while the role scores, and in its forward and backward pass.
- backward: in the role's training, from the first gradient to the reduction.
- reducing: while the first full bucket of gradients is reduced.
- training: in the role's forward, backward, gradient norm and optimizer step.
- norming: while the gradient norm is computed, just before the optimizer step.
- stepping: in the optimizer step.
- sending: while weights are gathered to be sent.
- saving: while weights are gathered to be saved.
- writing: while a checkpoint of states is written.
"""


def job_moments(roles: Iterable[Role], phases: Collection[Phase]) -> frozenset[Moment]:
    """Return all moments of a job that loads these roles and has these phases besides `load`."""
    inside = {Moment(phase, i) for phase in phases if phase != "load" for i in INSTANTS[phase]}
    loads = [_load_moments(role.name, role.order) for role in roles if not role.early]
    return frozenset(inside.union(*loads))


def _load_moments(role: str, order: int) -> tuple[Moment, Moment]:
    return Moment("load", f"read {role}", order), Moment("load", f"build {role}", order)


def lifetimes(role: Role, moments: frozenset[Moment]) -> Mapping[Life, frozenset[Moment]]:
    """Return for each lifetime the moments of the job at which such a tensor of a role exists.

    `moments` are all moments of the job.
    """
    return _lifetimes(role.name, role.order, role.trains, role.sends, role.early, moments)


@cache  # a search for settings that fit makes hundreds of plans with the same few roles
def _lifetimes(
    role: str,
    order: int,
    trains: TrainPhase | None,
    sends: bool,
    early: bool,
    moments: frozenset[Moment],
) -> Mapping[Life, frozenset[Moment]]:
    read, build = _load_moments(role, order)
    # A role that scores before the others are loaded does the same work at these moments.
    before = {
        Moment("precompute", "read"): read,
        Moment("precompute", "build"): build,
        Moment("precompute", "forward"): Moment("score", "forward"),
    }
    present = moments & before.keys() if early else moments - before.keys()

    def when(happens: Callable[[Moment], bool]) -> frozenset[Moment]:
        return frozenset(m for m in present if happens(before.get(m, m)))

    def at(phase: Phase | None, *instants: str) -> frozenset[Moment]:
        return when(lambda m: m.phase == phase and m.instant in instants)

    reading, building = when(lambda m: m == read), when(lambda m: m == build)
    built = building | when(lambda m: m.phase != "load" or m.order > order)
    verifying = at("sync", "forward") if sends else frozenset()
    scoring = verifying | when(lambda m: m.phase == "score")
    return {
        "always": reading | built,
        "built": built,
        "stepped": when(lambda m: m.phase != "load"),
        "loading": reading,
        "building": building,
        "scoring": scoring,
        "computing": scoring | at(trains, "forward_backward", "backward", "reduce"),
        "backward": at(trains, "backward", "reduce"),
        "reducing": at(trains, "reduce"),
        "training": when(lambda m: m.phase == trains),
        "norming": at(trains, "norm"),
        "stepping": at(trains, "step"),
        "sending": at("sync", "gather"),
        "saving": at("save", "gather"),
        "writing": at("save", "write"),
    }


assert set(INSTANTS) == set(PHASES) - {"load"}


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind on one rank.

    Attributes:
        of: the name of the elements in the formula.
        elements: elements of the undivided role, or of the buffer.
        each: bytes of an element; a fraction if scales come with a block of elements.
        source: the origin of the numbers.
        ranks: the number of ranks that share the elements.
        pinned: elements of each block of page-locked host memory (0: ordinary memory); PyTorch's
            allocator rounds every block up to a power of two.
        asleep: moments at which the tensors are in host memory instead of here.
    """

    kind: Kind
    name: str
    of: str
    elements: int
    each: float
    source: str
    ranks: int = 1
    where: Where = "device"
    life: Life = "always"
    pinned: int = 0
    asleep: frozenset[Moment] = frozenset()

    @property
    def bytes(self) -> int:
        """The bytes on one rank, with the rounding of pinned blocks."""
        share = -(-self.elements // self.ranks)
        if not self.pinned:
            return math.ceil(share * self.each)
        whole, rest = divmod(share, self.pinned)
        return whole * pinned_block(math.ceil(self.pinned * self.each)) + pinned_block(
            math.ceil(rest * self.each)
        )

    @property
    def formula(self) -> str:
        """The calculation of the bytes, in words and numbers."""
        text = f"{self.each:g} bytes x {self.elements:,} {self.of}"
        if self.ranks > 1:
            text += f" / {self.ranks} ranks"
        return f"{text}, pinned blocks rounded up to powers of two" if self.pinned else text


def state_items(
    role: Role, kept: Iterable[Tensors], moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield a role's tensors with the moments at which each exists; empty tensors are left out.

    `moments` are all moments of the job.
    """
    lives = lifetimes(role, moments)
    for tensors in kept:
        if tensors.elements:
            kind = tensors.kind if role.trains else "frozen models"
            size = (tensors.bytes, tensors.formula, tensors.source)
            item = Item(role.name, kind, tensors.name, tensors.where, "allocated", *size)
            yield Allocation(item, lives[tensors.life] - tensors.asleep)


def pinned_block(size: int) -> int:
    """Return the bytes that PyTorch takes for a block of page-locked memory: the next power of two.

    See ATen/core/CachingHostAllocator.h, `allocate`.
    """
    return 0 if size == 0 else 1 << (size - 1).bit_length()
