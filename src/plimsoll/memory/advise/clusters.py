"""The machines on which a config fits as it is written: more of the same, or others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plimsoll.machine.hardware import BFLOAT16_UNITS, CARDS, Card, Hardware
from plimsoll.memory.advise.moves import filled, grown
from plimsoll.memory.advise.states import Site, State
from plimsoll.memory.advise.suggestion import Suggestion, suggestion_of
from plimsoll.memory.remedies.changes import Move, changes_between

_MOST_TIMES = 8
"""As many nodes as given: nobody rents more for one config, and a smaller change will do."""


@dataclass(frozen=True)
class Cluster:
    """So many nodes of one hardware, and what changes with them."""

    nodes: int
    suggestion: Suggestion


def smallest_cluster(site: Site, root: State) -> Cluster | None:
    """On the same hardware: free cards have ranks, and nodes are added, or taken away."""
    found = _smallest(site, root)
    return None if found is None else Cluster(found.spec.cluster.nodes, suggestion_of(root, found))


def other_cards(site: Site, root: State) -> Cluster | None:
    """With larger cards than these, one known card of each size: the config as written on as many
    nodes with as many cards each, or on more nodes; with the least memory of all cards together."""
    own = site.ground.hardware.nodes[0].cards
    if root.fits or not own or site.spec.cluster.device == "cpu":
        return None
    found = {card: _fitting(_with_card(site, card)) for card in _larger(own[0])}
    fitting = [(card, state) for card, state in found.items() if state is not None]
    if not fitting:
        return None
    card, state = min(fitting, key=lambda one: one[1].spec.cluster.nodes * one[0].usable_bytes)
    hardware: Move = {"cluster.hardware": f"{len(own)}x{card.name}"}
    more = changes_between(site.spec, hardware)
    return Cluster(state.spec.cluster.nodes, suggestion_of(root, state, *more))


def _larger(own: Card) -> Iterator[Card]:
    """The first known card of each size, of those with bf16 units."""
    able = [card for card in CARDS if (card.compute_capability or BFLOAT16_UNITS) >= BFLOAT16_UNITS]
    sizes = {card.nominal_bytes: card for card in reversed(able)}
    return (card for size, card in sizes.items() if size > own.nominal_bytes)


def _fitting(site: Site) -> State | None:
    return site.root if site.root.fits else _smallest(site, site.root)


def _with_card(site: Site, card: Card) -> Site:
    nodes = site.ground.hardware.nodes
    others = tuple(replace(node, cards=(card,) * len(node.cards)) for node in nodes)
    return Site(site.spec, replace(site.ground, hardware=Hardware(others), host=None))


def _smallest(site: Site, root: State) -> State | None:
    """First ranks on cards that are free; then nodes are doubled, up to `_MOST_TIMES` as many,
    until the config as written fits, or has ranks without work, and then halved in."""
    if site.spec.cluster.where == "local":
        return None
    hardware = site.ground.hardware

    def at(steps: int) -> State | None:
        nodes = {"cluster.nodes": site.spec.cluster.nodes + steps}
        unplaced = root.has("more-ranks-than-gpus")  # new ranks would leave as many without a card
        move = nodes if unplaced else grown(site.spec, hardware, steps)
        if steps == 0 and not root.fits:
            move = filled(site.spec, hardware)
        return site.with_values(move)

    def enough(steps: int) -> bool:
        state = at(steps)
        return state is not None and (state.fits or state.idles_beside(root))

    fitting, lacking = 0, -site.spec.cluster.nodes
    most = (_MOST_TIMES - 1) * site.spec.cluster.nodes
    while not enough(fitting):
        if fitting == most:
            return None
        fitting, lacking = min(most, 2 * fitting or 1), fitting
    found = at(nearest_fitting(fitting, lacking, enough))
    return found if found is not None and found.fits and not found.idles_beside(root) else None


def nearest_fitting(fitting: int, lacking: int, enough: Callable[[int], bool]) -> int:
    """What fits and is nearest to what does not, by halving what is between."""
    while abs(fitting - lacking) > 1:
        middle = (fitting + lacking) // 2
        fitting, lacking = (middle, lacking) if enough(middle) else (fitting, middle)
    return fitting
