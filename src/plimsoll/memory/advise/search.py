"""The search for changes that make a config fit, or faster: every single move, then further moves
on those configs that lack least. A plan is made of each, so its verdict is a plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from plimsoll.config.jobs import JobConfig, RlJobConfig
from plimsoll.memory.advise.changes import Change, changed, changes_between
from plimsoll.memory.advise.effects import EFFECTS, Effect, effect_of
from plimsoll.memory.advise.moves import Move, faster_moves, on_nodes, saving_moves
from plimsoll.memory.advise.speed import step_seconds
from plimsoll.memory.contents.stores import VERDICTS, Band, Store, likely_worst
from plimsoll.memory.machine.hardware import Hardware
from plimsoll.memory.plan.plan import Ground, Load, weigh

_DEEPEST, _LEAST_DEEP = 5, 2
"""Moves on top of one another; fewer are tried even where one alone would do."""
_WIDTH = 10
"""Configs that are taken further at each depth."""
_MOST_PLANS, _LEAST_PLANS = 400, 60
"""Of one search; the more nodes there are the fewer, as a plan of many takes longer."""
_FEW_NODES = 8
_FASTER = 0.95
"""Of the seconds, at most, for a config to count as faster than another one."""
_LARGER_SHARE = 0.1
"""Of a card, more: what a further change is worth where the estimate sees no difference."""
_SCALES = ("micro_batch_tokens", "stage", "memory_share", "nodes", "ranks")


@dataclass(frozen=True)
class State:
    """A config on its way to fit. changes: from the config as written. hardware: of the plan."""

    changes: frozenset[Change]
    config: JobConfig
    hardware: Hardware
    load: Load

    @cached_property
    def lacking(self) -> float:
        """How much every phase of every store lacks, with the plan's band, as shares of their
        capacities; other errors count 1 each. 0 where it fits."""
        errors = [problem for problem in self.load.problems if problem.severity == "error"]
        return len(errors) + sum(_lacking(store, self.load.band) for store in self.load.stores)

    @cached_property
    def seconds(self) -> float:
        """Of a step, estimated."""
        return step_seconds(self.load.job)

    @property
    def rank(self) -> int:
        """Of the verdict: 0 fits."""
        return VERDICTS.index(self.load.verdict)

    def has(self, code: str) -> bool:
        """Whether the plan has such a problem."""
        return any(problem.code == code for problem in self.load.problems)

    def idles_beside(self, other: State) -> bool:
        """Whether it has ranks without work, and the other has none."""
        return self.has("idle-ranks") and not other.has("idle-ranks")


@dataclass(frozen=True)
class Site:
    """What is planned, on what; and what was tried already."""

    config: JobConfig
    ground: Ground
    known: dict[frozenset[Change], State | None] = field(default_factory=dict)

    @property
    def root(self) -> State:
        """The config as written."""
        root = self.tried(frozenset())
        assert root is not None, "a config whose settings contradict one another"
        return root

    @property
    def most_plans(self) -> int:
        """That a search may make."""
        return max(_LEAST_PLANS, _MOST_PLANS // -(-self.config.cluster.nodes // _FEW_NODES))

    def tried(self, changes: frozenset[Change]) -> State | None:
        """The config with these changes; None where they contradict one another."""
        if changes not in self.known:
            self.known[changes] = self._plan(changes)
        return self.known[changes]

    def _plan(self, changes: frozenset[Change]) -> State | None:
        config = changed(self.config, in_order(changes))
        if config is None:
            return None
        hardware = on_nodes(self.ground.hardware, config)
        load = weigh(config, replace(self.ground, hardware=hardware))
        return State(changes, config, hardware, load)


Measure = Callable[[State], float]
"""What a search makes smaller, down to 0."""


def saving_states(site: Site, root: State, effects: Iterable[Effect] = EFFECTS) -> list[State]:
    """States that fit better than the config as written, none with a change too many.

    Each effect is searched by itself, with all that have less: what would be learned the same may
    take several changes, where a single one of another method is enough.
    """

    def moves(state: State) -> Iterator[Move]:
        return saving_moves(state.config, state.load, state.hardware)

    def lacking(state: State) -> float:
        return state.lacking

    better = [
        _trimmed(site, state)
        for effect in effects
        for state in _search(site, root, moves, lacking, effect)
        if state.rank < root.rank
    ]
    return _undominated(better)


def faster_states(site: Site, root: State) -> list[State]:
    """States that fit too, and are faster."""

    def measure(state: State) -> float:
        return state.seconds if state.load.verdict == "fits" else inf

    def moves(state: State) -> Iterator[Move]:
        return faster_moves(state.config, state.hardware)

    found = _search(site, root, moves, measure, "machines")
    return _undominated([s for s in found if measure(s) < _FASTER * root.seconds])


def _search(
    site: Site,
    root: State,
    moves: Callable[[State], Iterator[Move]],
    measure: Measure,
    effect: Effect,
) -> list[State]:
    """All states that measure less than those that they come from, and have at most that effect:
    of one move, of two, and of more until some measure 0 or there are too many."""
    found: list[State] = []
    frontier, seen = [root], {root.changes}
    for depth in range(1, _DEEPEST + 1):
        fresh = [
            state
            for parent in frontier
            for state in _next(site, parent, moves(parent), seen, effect)
            if not state.idles_beside(root) and measure(state) < measure(parent)
        ]
        found += fresh
        done = depth >= _LEAST_DEEP and any(state.rank < root.rank for state in found)
        if done or len(seen) >= site.most_plans:
            break
        frontier = sorted((state for state in fresh if measure(state) > 0), key=measure)[:_WIDTH]
    return found


def _next(
    site: Site,
    parent: State,
    moves: Iterable[Move],
    seen: set[frozenset[Change]],
    effect: Effect,
) -> Iterator[State]:
    """What the moves make of a state, each once."""
    so_far = {change.key: change.after for change in parent.changes}
    for move in moves:
        changes = frozenset(changes_between(site.config, {**so_far, **move}))
        if changes in seen or len(seen) >= site.most_plans:
            continue
        if EFFECTS.index(effect_of(changes)) > EFFECTS.index(effect):
            continue
        seen.add(changes)
        state = site.tried(changes)
        if state is not None:
            yield state


def _trimmed(site: Site, state: State) -> State:
    """Without the changes that it does as well without: of all roles together, or of one."""
    singles = in_order(state.changes)
    alike = {_of_any_role(change): set[Change]() for change in singles}
    for change in singles:
        alike[_of_any_role(change)].add(change)
    for unwanted in (*alike.values(), *({change} for change in singles)):
        fewer = site.tried(state.changes - unwanted)
        if fewer is not None and fewer.rank <= state.rank:
            state = fewer
    return state


def _of_any_role(change: Change) -> str:
    return change.key.partition(".")[2]


def _undominated(states: Iterable[State]) -> list[State]:
    """Of states that set the same scales the fastest; and none that changes more than another one
    which fits as well and is about as fast."""
    best: dict[object, State] = {}
    for state in states:
        kind = (state.rank, _kinds(state))
        if kind not in best or state.seconds < best[kind].seconds:
            best[kind] = state
    kept = list(best.values())
    return [state for state in kept if not any(_dominates(other, state) for other in kept)]


def _kinds(state: State) -> frozenset[object]:
    return frozenset(
        change.key if change.key.endswith(_SCALES) else change for change in state.changes
    )


def _dominates(one: State, other: State) -> bool:
    return (
        _kinds(one) < _kinds(other)
        and one.rank <= other.rank
        and one.seconds <= other.seconds / _FASTER
        and _share(one) > _share(other) - _LARGER_SHARE
    )


def _share(state: State) -> float:
    """Of a card, that vLLM has; 0 without."""
    return state.config.rollout.memory_share if isinstance(state.config, RlJobConfig) else 0.0


def _lacking(store: Store, band: Band) -> float:
    if store.capacity is None:
        return 0.0
    over = (likely_worst(use, band) / store.capacity - 1 for use in store.phases)
    return sum(max(0.0, share) for share in over)


def in_order(changes: Iterable[Change]) -> tuple[Change, ...]:
    """By key."""
    return tuple(sorted(changes, key=lambda change: change.key))
