"""The node of each CPU process, and the cards of engines that share the ranks' cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod

from plimsoll.errors import SettingsConflict
from plimsoll.run.counting import plural


@dataclass(frozen=True, order=True)
class NodeCards:
    """Cards of one Ray node, by their names there (see `Host`); none on CPU."""

    node_id: str
    cards: tuple[str, ...]


def spread(nodes: Sequence[str], count: int) -> list[NodeCards]:
    """Return seats on CPU, spread evenly over the nodes, in their order, as the plan has it."""
    return [NodeCards(nodes[i * len(nodes) // count], ()) for i in range(count)]


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Return the order in which processes are numbered, given the node of each: node by node.

    Ray mixes them up on more than two nodes of 8 cards (it sorts bundles that are alike by
    std::sort), and a trainer engine may take neighbours for ranks of one node.
    """
    return sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i]))


def shared_placement(
    ranks: Sequence[NodeCards], engines: int, degrees: Mapping[str, int]
) -> list[NodeCards]:
    """Return cards of one node for each engine, in the order of the ranks; no card twice.

    Args:
        ranks: Each rank's own cards.
        engines: The number of engines.
        degrees: Over how many cards an engine is divided, by the keys that set them.

    Raises:
        SettingsConflict: The ranks' cards are too few.
    """
    parts = prod(degrees.values())
    placement = list(islice(_placement(ranks, parts), engines))
    if len(placement) < engines:
        keys = f" ({' x '.join(degrees)})" if degrees else ""
        raise SettingsConflict(
            f"rollout.placement is shared, and {plural(engines, 'engine')} (rollout.engines) of "
            f"{plural(parts, 'card')} each{keys} cannot find room on the cards of "
            f"{plural(len(ranks), 'training rank')}: there is room for {len(placement)}. An "
            "engine's cards must be of one node. Ask for fewer engines, or write "
            "rollout.placement: own"
        )
    return placement


def _placement(ranks: Sequence[NodeCards], parts: int) -> Iterator[NodeCards]:
    for node_id, group in groupby(sorted(ranks), key=lambda place: place.node_id):
        cards = [card for place in group for card in place.cards]
        for start in range(0, len(cards) - parts + 1, parts):
            yield NodeCards(node_id, tuple(cards[start : start + parts]))
