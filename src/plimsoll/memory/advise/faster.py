"""The search for changes that make a config that fits faster."""

from __future__ import annotations

from plimsoll.memory.advise.alike import undominated
from plimsoll.memory.advise.moves import faster_moves
from plimsoll.memory.advise.states import Site, State
from plimsoll.memory.remedies.changes import Change, changes_between

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
    so_far = {change.key: change.after for change in parent.changes}
    moves = faster_moves(parent.spec, parent.hardware)
    made = [frozenset(changes_between(site.spec, {**so_far, **move})) for move in moves]
    fresh = [changes for changes in dict.fromkeys(made) if changes not in seen][: most - len(seen)]
    seen.update(fresh)
    return [state for state in map(site.tried, fresh) if state is not None]
