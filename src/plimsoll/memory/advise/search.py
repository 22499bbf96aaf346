"""The searches for changes that make a config fit, or one that fits faster. Each config that is
tried is planned, so its verdict is a plan's.

For what fits, the search goes down: in one respect after another it makes the move after which
least is lacking, until nothing is. What is not needed is then taken back. From there it looks for
what asks for less: other values, and what else would do instead of each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log2

from plimsoll.memory.advise.effects import (
    EFFECTS,
    ON_MORE_MACHINES,
    Effect,
    effect_of,
    learned_effect,
    within,
)
from plimsoll.memory.advise.engine_moves import engine_forms, narrow_engines
from plimsoll.memory.advise.moves import SAVING, faster_moves, saving_moves
from plimsoll.memory.advise.states import Site, Size, State, in_order, part_of
from plimsoll.memory.remedies.changes import Change, Move

_PASSES = 4
"""Through all respects: what is made later may make room for what was made before to be less."""
_LESSENED = 3
"""Of what else would do, so many that ask for least are followed further."""


@dataclass(frozen=True)
class Search:
    """For changes of at most an effect, from a root that does not fit, or is risky."""

    site: Site
    root: State
    effect: Effect

    def better(self, state: State) -> bool:
        """Whether it fits better than the config as written."""
        return state.rank < self.root.rank

    def size(self, state: State) -> Size:
        """How much it asks for."""
        return state.size(self.root)

    def after(self, state: State, move: Move, barred: frozenset[str] = frozenset()) -> State | None:
        """The state with a move made; None where it contradicts the rest, leaves ranks without
        work, has another effect, or changes one of the barred keys (of any role)."""
        changes = state.with_move(self.site.spec, move)
        if not within(effect_of(changes), self.effect) or barred & set(map(part_of, changes)):
            return None
        found = self.site.tried(changes)
        return None if found is None or found.idles_beside(self.root) else found


def saving_states(site: Site, root: State) -> list[State]:
    """States that fit better than the config as written, none with a change too many; what asks for
    least of all is among them.

    Each effect is searched by itself, with those that it includes; other machines only by single
    moves where these will do.
    """
    found: list[State] = []
    for effect in EFFECTS:
        search = Search(site, root, effect)
        if not found:
            found += _smallest(search)
        elif effect in ON_MORE_MACHINES:
            found += _singles(search)
        else:
            found += _others(search)
    return undominated(found, root)


def smallest_state(site: Site, root: State) -> State | None:
    """What asks for least of what fits better; None where nothing does."""
    for effect in EFFECTS:
        search = Search(site, root, effect)
        if found := _smallest(search):
            return min(found, key=search.size)
    return None


def _smallest(search: Search) -> list[State]:
    """States of this effect, among them the one that asks for least."""
    found = _first(search) or list(_narrow(search))
    followed: list[State] = []
    while found and (best := min(found, key=search.size)) not in followed:
        followed.append(best)
        found += _lessened(search, best)
        others = dict.fromkeys(_instead(search, min(found, key=search.size)))
        found += others
        for other in sorted(others, key=search.size)[:_LESSENED]:
            found += _lessened(search, other)
    return found


def _others(search: Search) -> list[State]:
    """States of this effect, of which not the least is looked for."""
    found = [*_first(search), *_narrow(search)]
    if found:
        best = min(found, key=search.size)
        found += [*_lessened(search, best), *_elsewhere(search, best)]
    return found


def _first(search: Search) -> list[State]:
    """The single moves that do, and where the way down ends."""
    return [*_singles(search), *_reached(search, search.root)]


def _narrow(search: Search) -> Iterator[State]:
    """Yield where the way down ends from engines with weights in fewer bits, which no other way
    tries. Changes of the least effect are taken away first: the search is for the others."""
    start = _best(search, search.root, narrow_engines(search.root.plan), frozenset())
    down = _down(search, start)
    if start is not search.root and search.better(down):
        by_effect = sorted(in_order(down.changes), key=lambda one: EFFECTS.index(effect_of([one])))
        yield _trimmed(search, down, by_effect)


def _singles(search: Search) -> list[State]:
    made = (search.after(search.root, move) for move in saving_moves(search.root.plan))
    return [_trimmed(search, one) for one in made if one is not None and search.better(one)]


def _reached(search: Search, start: State, barred: frozenset[str] = frozenset()) -> Iterator[State]:
    """Where the way down from a state ends, if it fits better, without what it does not need."""
    down = _down(search, start, barred)
    if search.better(down):
        yield _trimmed(search, down)


def _down(search: Search, state: State, barred: frozenset[str] = frozenset()) -> State:
    """From a state to one that lacks nothing, or as little as can be reached; then engines take
    what is left."""
    for _ in range(_PASSES):
        before = state
        for moves in SAVING:
            if state.lacking == 0:
                return _best(search, state, engine_forms(state.plan), barred)
            state = _best(search, state, moves(state.plan), barred)
        if state is before:
            break
    return state


def _best(search: Search, state: State, moves: Iterable[Move], barred: frozenset[str]) -> State:
    """What lacks least after one of the moves, or none; of equals what asks for least."""
    made = (search.after(state, move, barred) for move in moves)
    return min(
        (state, *(one for one in made if one is not None)),
        key=lambda one: (one.lacking, search.size(one)),
    )


def _lessened(search: Search, state: State) -> Iterator[State]:
    """States that ask for less and less: each one move from the one before."""
    while True:
        made = (search.after(state, move) for move in _near(search, state))
        hopeful = (one for one in made if one and one.may_be_as_small(state, search.root))
        asking = (one for one in hopeful if search.better(one) and _as_small(search, one, state))
        trimmed = (_trimmed(search, one) for one in asking)
        less = next((one for one in trimmed if search.size(one) < search.size(state)), None)
        if less is None:
            return
        yield less
        state = less


def _near(search: Search, state: State) -> Iterator[Move]:
    """Other values of what is changed, and further moves."""
    keys = {change.key for change in state.changes}
    for move in saving_moves(search.root.plan):
        if keys & set(move):
            yield move
    yield from saving_moves(state.plan)


def _as_small(search: Search, one: State, other: State) -> bool:
    """But for the number of changes, of which one may have some too many."""
    return search.size(one)[:5] <= search.size(other)[:5]


def _instead(search: Search, state: State) -> Iterator[State]:
    """Without each of the changes, what else would do; and with the engines elsewhere."""
    yield from _elsewhere(search, state)
    for key in sorted(state.parts):
        kept = frozenset(change for change in state.changes if part_of(change) != key)
        for start in (search.site.tried(kept), search.root):
            if start is not None:
                yield from _reached(search, start, frozenset({key}))


def _elsewhere(search: Search, state: State) -> Iterator[State]:
    made = (search.after(search.root, move) for move in engine_forms(search.root.plan))
    others = [one for one in made if one is not None and _placement(one) != _placement(state)]
    if others:
        start = min(others, key=lambda one: (one.lacking, search.size(one)))
        yield from _reached(search, start)


def _placement(state: State) -> str | None:
    engines = state.spec.engines
    return None if engines is None else engines.placement


def _trimmed(search: Search, state: State, order: Sequence[Change] = ()) -> State:
    """Return the state without the changes that it does as well without, of all roles together or
    of one.

    Args:
        order: the changes in the order in which they are taken away; default: by key.
    """
    singles = order or in_order(state.changes)
    alike = {part_of(change): set[Change]() for change in singles}
    for change in singles:
        alike[part_of(change)].add(change)
    for unwanted in (*alike.values(), *({change} for change in singles)):
        fewer = search.site.tried(state.changes - unwanted)
        if fewer is not None and fewer.rank <= state.rank:
            state = fewer
    return state


_FASTER = 0.95
"""Of the seconds, at most, for a config to count as faster."""
_DEEPEST, _WIDTH = 5, 10
"""Moves on top of one another; configs that are taken further at each depth."""
_MOST_PLANS, _LEAST_PLANS, _FEW_NODES = 400, 60, 8
"""Of a search; the more nodes there are the fewer, as a plan of many takes longer."""


def faster_states(site: Site, root: State) -> list[State]:
    """States that fit too, and are faster: of one move, of two, and of more, each faster than the
    one before."""
    found: list[State] = []
    frontier, seen = [root], {root.changes}
    most = max(_LEAST_PLANS, _MOST_PLANS // -(-site.spec.cluster.nodes // _FEW_NODES))
    for _ in range(_DEEPEST):
        fresh = [
            state
            for parent in frontier
            for state in _next(site, parent, seen, most)
            if state.rank == 0 and state.seconds < parent.seconds
            if not state.idles_beside(root)
        ]
        found += fresh
        if len(seen) >= most:
            break
        frontier = sorted(fresh, key=lambda state: state.seconds)[:_WIDTH]
    return undominated([s for s in found if s.seconds < _FASTER * root.seconds], root)


def _next(site: Site, parent: State, seen: set[frozenset[Change]], most: int) -> list[State]:
    """What the moves make of a state, each once."""
    moves = faster_moves(parent.spec, parent.hardware)
    made = [parent.with_move(site.spec, move) for move in moves]
    fresh = [changes for changes in dict.fromkeys(made) if changes not in seen][: most - len(seen)]
    seen.update(fresh)
    return [state for state in map(site.tried, fresh) if state is not None]


_COMMON = 0.5
"""Of all that two states change, the part in common from which on they are near-twins; what changes
less is none."""


def undominated(states: Iterable[State], root: State) -> list[State]:
    """What asks for least, and of the others those that are no near-twins of one that asks for
    less, and are better than each in some respect."""
    kept: list[State] = []
    for state in sorted(states, key=lambda one: one.size(root)):
        if not any(_does_instead(other, state, root) for other in kept):
            kept.append(state)
    return kept


def _does_instead(one: State, other: State, root: State) -> bool:
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
