"""Which of many states are worth showing."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from plimsoll.memory.advise.effects import EFFECTS, learned_effect
from plimsoll.memory.advise.states import State

_COMMON = 0.5
"""Of all that two states change, the part in common from which on they are near-twins; what changes
less is none."""


def undominated(states: Iterable[State], root: State) -> list[State]:
    """What asks for least, and of the others those that are no near-twins of one that asks for
    less, and are better than each in some respect."""
    kept: list[State] = []
    for state in sorted(states, key=lambda one: one.size(root)):
        if not any(_instead(other, state, root) for other in kept):
            kept.append(state)
    return kept


def _instead(one: State, other: State, root: State) -> bool:
    """Whether one, which asks for no more, does instead of the other."""
    own, others = _results(one, root), _results(other, root)
    if not _no_worse(own, others):
        return one.parts == other.parts and one.rank <= other.rank
    common = len(one.parts & other.parts) / len(one.parts | other.parts)
    if common >= _COMMON and len(one.parts) <= len(other.parts):
        return True
    own_costs, others_costs = _costs(one), _costs(other)
    return _no_worse(own_costs, others_costs) and (own, own_costs) != (others, others_costs)


def _results(state: State, root: State) -> tuple[int, ...]:
    """What it does to what is learned, more machines and cards, whether over 4 bits, verdict, and
    speed (roughly)."""
    nodes, _, quantised, rank, speed, _, _ = state.size(root)
    learned = EFFECTS.index(learned_effect(state.changes))
    cards = state.spec.cluster.ranks > root.spec.cluster.ranks
    return learned, nodes, cards, quantised, rank, speed


def _costs(state: State) -> tuple[int, int]:
    """How much it changes, and the memory of all hosts, in powers of two."""
    host = sum(store.peak.bytes * len(store.slots) for store in state.plan.hosts)
    return len(state.parts), round(log2(host))


def _no_worse(own: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(own, others, strict=True))
