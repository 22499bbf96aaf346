"""The search for changes that make a config fit. Each config that is tried is planned, so its
verdict is a plan's.

It goes down: in one respect after another it makes the move after which least is lacking, until
nothing is. What is not needed is then taken back. From there it looks for what asks for less: other
values, and what else would do instead of each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plimsoll.memory.advise.alike import undominated
from plimsoll.memory.advise.effects import EFFECTS, ON_MORE_MACHINES, Effect, effect_of, within
from plimsoll.memory.advise.engine_moves import engine_forms
from plimsoll.memory.advise.moves import SAVING, saving_moves
from plimsoll.memory.advise.states import Site, Size, State, in_order, part_of
from plimsoll.memory.remedies.changes import Change, Move, changes_between

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
        so_far = {change.key: change.after for change in state.changes}
        changes = frozenset(changes_between(self.site.spec, {**so_far, **move}))
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
    found = _first(search)
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
    found = _first(search)
    if found:
        best = min(found, key=search.size)
        found += [*_lessened(search, best), *_elsewhere(search, best)]
    return found


def _first(search: Search) -> list[State]:
    """The single moves that do, and where the way down ends."""
    down = _trimmed(search, _down(search, search.root))
    return [*_singles(search), *([down] if search.better(down) else [])]


def _singles(search: Search) -> list[State]:
    made = (search.after(search.root, move) for move in saving_moves(search.root.plan))
    return [_trimmed(search, one) for one in made if one is not None and search.better(one)]


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
        asking = (one for one in made if one is not None and search.better(one))
        asking = (one for one in asking if _as_small(search, one, state))
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
                other = _trimmed(search, _down(search, start, frozenset({key})))
                if search.better(other):
                    yield other


def _elsewhere(search: Search, state: State) -> Iterator[State]:
    made = (search.after(search.root, move) for move in engine_forms(search.root.plan))
    others = [one for one in made if one is not None and _placement(one) != _placement(state)]
    if others:
        start = min(others, key=lambda one: (one.lacking, search.size(one)))
        other = _trimmed(search, _down(search, start))
        if search.better(other):
            yield other


def _placement(state: State) -> str | None:
    engines = state.spec.engines
    return None if engines is None else engines.placement


def _trimmed(search: Search, state: State) -> State:
    """Without the changes that it does as well without: of all roles together, or of one."""
    singles = in_order(state.changes)
    alike = {part_of(change): set[Change]() for change in singles}
    for change in singles:
        alike[part_of(change)].add(change)
    for unwanted in (*alike.values(), *({change} for change in singles)):
        fewer = search.site.tried(state.changes - unwanted)
        if fewer is not None and fewer.rank <= state.rank:
            state = fewer
    return state
