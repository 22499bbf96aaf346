"""Configs on their way to fit, each planned once: what they lack, how fast they are, and how much
they ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from typing import Any

from plimsoll.machine.hardware import Hardware
from plimsoll.memory.advise.effects import EFFECTS, Effect, effect_of
from plimsoll.memory.advise.speed import step_seconds
from plimsoll.memory.contents.contents import Job, make_job
from plimsoll.memory.contents.layout import lay_out
from plimsoll.memory.contents.stores import VERDICTS, Band, Store, likely_worst
from plimsoll.memory.plan.plan import Ground, Plan, weigh_job
from plimsoll.memory.remedies.changes import Change, Move, changed, changes_between
from plimsoll.memory.rules.ranks import idle_ranks
from plimsoll.spec.run_spec import RunSpec

_ALIKE = 1.25
"""Of two times: between which the number of changes decides, and not the estimate."""

_ERROR = 1000.0
"""Of what memory lacks, which is a few times the capacities: what else has to go first."""

_QUANTISED = {"model.quantization", "vllm.arguments.quantization"}

Size = tuple[int, int, bool, int, int, int, float]
"""How much is asked for, as it is compared: more nodes, the effect on what is learned, whether
weights of a base or of engines have fewer bits, the verdict, the speed (roughly), the number of
parts changed, the speed."""


@dataclass(frozen=True, eq=False)
class State:
    """A config on its way to fit; a `Site` has one for the same changes. It is planned when it is
    first asked for what takes a plan.

    changes: from the config as written. ground: with as many machines as the config names.
    """

    changes: frozenset[Change]
    job: Job
    ground: Ground

    @property
    def spec(self) -> RunSpec[Any]:
        return self.job.spec

    @property
    def hardware(self) -> Hardware:
        return self.ground.hardware

    @cached_property
    def plan(self) -> Plan:
        return weigh_job(self.job, self.ground)

    @cached_property
    def lacking(self) -> float:
        """How much every phase of every store lacks, with the plan's band, as shares of their
        capacities; other errors count more than any of it. 0 where it fits."""
        errors = sum(problem.severity == "error" for problem in self.plan.problems)
        return _ERROR * errors + sum(_lacking(store, self.plan.band) for store in self.plan.stores)

    @cached_property
    def seconds(self) -> float:
        """Of a step, estimated."""
        return step_seconds(self.job)

    @property
    def rank(self) -> int:
        """Of the verdict: 0 fits."""
        return VERDICTS.index(self.plan.verdict)

    @property
    def fits(self) -> bool:
        return self.rank == 0

    @cached_property
    def effect(self) -> Effect:
        """Of all changes."""
        return effect_of(self.changes)

    @cached_property
    def parts(self) -> frozenset[str]:
        """What is changed, as `part_of` says."""
        return frozenset(map(part_of, self.changes))

    def size(self, root: State) -> Size:
        """What is compared where one asks for less than another. root: the config as written."""
        return self._size(root, self.rank)

    def may_be_as_small(self, other: State, root: State) -> bool:
        """Whether it asks for no more than another, but for the number of changes, if it fits; so
        it needs no plan where it does not."""
        return self._size(root, 0)[:5] <= other.size(root)[:5]

    def _size(self, root: State, rank: int) -> Size:
        relative = self.seconds / root.seconds
        return (
            max(0, self.spec.cluster.nodes - root.spec.cluster.nodes),
            EFFECTS.index(self.effect),
            bool(self.parts & _QUANTISED),
            rank,
            round(log(relative, _ALIKE)),
            len(self.parts),
            relative,
        )

    def with_move(self, spec: RunSpec[Any], move: Move) -> frozenset[Change]:
        """The changes from the config as written, with a move made on top of them."""
        so_far = {change.key: change.after for change in self.changes}
        return frozenset(changes_between(spec, {**so_far, **move}))

    def has(self, code: str) -> bool:
        """Whether the plan has such a problem."""
        return any(problem.code == code for problem in self.plan.problems)

    def idles_beside(self, other: State) -> bool:
        """Whether it has ranks without work, and the other has none."""
        return any(idle_ranks(self.job)) and not any(idle_ranks(other.job))


@dataclass(frozen=True)
class Site:
    """What is planned, on what; and what was tried already."""

    spec: RunSpec[Any]
    ground: Ground
    known: dict[frozenset[Change], State | None] = field(default_factory=dict)

    @property
    def root(self) -> State:
        """The config as written."""
        root = self.tried(frozenset())
        assert root is not None, "a spec whose settings contradict one another"
        return root

    def with_values(self, move: Move) -> State | None:
        """The config as written, with these values alone. None as `tried`."""
        return self.tried(frozenset(changes_between(self.spec, move)))

    def tried(self, changes: frozenset[Change]) -> State | None:
        """The config with these changes; None where they contradict one another."""
        if changes not in self.known:
            self.known[changes] = self._plan(changes)
        return self.known[changes]

    def _plan(self, changes: frozenset[Change]) -> State | None:
        spec = changed(self.spec, in_order(changes))
        if spec is None:
            return None
        ground = self.ground.under(spec)
        return State(changes, make_job(spec, ground.hardware, ground.constants), ground)


def _lacking(store: Store, band: Band) -> float:
    if store.capacity is None:
        return 0.0
    over = (likely_worst(use, band) / store.capacity - 1 for use in store.phases)
    return sum(max(0.0, share) for share in over)


def in_order(changes: Iterable[Change]) -> tuple[Change, ...]:
    """By key."""
    return tuple(sorted(changes, key=lambda change: change.key))


def part_of(change: Change) -> str:
    """What is changed, of any role that learns: the key without it. A reference is one part, for it
    is there or not with all its keys."""
    role, _, key = change.key.partition(".")
    return role if role == "reference" else key


_COMPLETE: Mapping[str, frozenset[str]] = {
    "zero.stage": frozenset({"zero.parameter_offload", "zero.optimizer_offload"}),
    "adapter.rank": frozenset({"model.quantization"}),
    "vllm.sleep_level": frozenset({"placement"}),
}
"""Parts that only complete another, which cannot be without them."""


def count_parts(parts: Collection[str]) -> int:
    """Return how many changes a person sees in these parts: those that complete another are none
    of their own."""
    return sum(_COMPLETE.get(part, frozenset()).isdisjoint(parts) for part in parts)


def free_cards(spec: RunSpec[Any], hardware: Hardware) -> int:
    """Cards of the config's nodes that no process has; engines that share cards take none."""
    cluster, cards = spec.cluster, [len(hardware.nodes[0].cards)] * spec.cluster.nodes
    if cluster.device == "cpu" or not any(cards):
        return 0
    if spec.engines and spec.engines.placement == "shared":
        return max(0, sum(cards) - cluster.all_ranks)
    return max(0, sum(cards) - lay_out(spec, cards).cards_needed)


def with_room(spec: RunSpec[Any], move: Move, hardware: Hardware) -> Move:
    """The move with as many nodes as its processes need; none where even many would not do."""
    made = changed(spec, changes_between(spec, move))
    cards = len(hardware.nodes[0].cards)
    if made is None or not cards:
        return move if made else {}
    nodes = made.cluster.nodes
    needed = -(-lay_out(made, [cards] * nodes).cards_needed // cards)
    for count in range(nodes, max(nodes, needed) + 2):
        if not lay_out(made, [cards] * count).unplaced:
            return move if count == nodes else {**move, "cluster.nodes": count}
    return {}
