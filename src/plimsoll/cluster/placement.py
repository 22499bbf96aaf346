"""Choose the node of each CPU process, and the cards of engines that share the ranks' cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod

from plimsoll.errors import SettingsConflict
from plimsoll.run.counting import plural


@dataclass(frozen=True, order=True)
class NodeCards:
    """A Ray node and cards of it, by their names there (see `Host`); no cards on CPU."""

    node_id: str
    cards: tuple[str, ...]


def spread(nodes: Sequence[str], count: int) -> list[NodeCards]:
    """Return a node for each of `count` CPU processes: evenly spread, in the order of the nodes."""
    return [NodeCards(nodes[i * len(nodes) // count], ()) for i in range(count)]


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Return the indices of processes sorted by node, given the node of each process.

    Nodes keep the order of their first process. Ray mixes nodes up if there are more than two nodes
    of 8 cards (it uses std::sort on equal bundles). A trainer engine may take neighbouring ranks
    for ranks of one node.
    """
    return sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i]))


def shared_placement(
    ranks: Sequence[NodeCards], engines: int, degrees: Mapping[str, int]
) -> list[NodeCards]:
    """Return the cards of each engine: all on one node, and no card for two engines.

    Args:
        ranks: Each rank's cards.
        engines: The number of engines.
        degrees: The factors of an engine's number of cards, by the keys that set them.

    Raises:
        SettingsConflict: The ranks have too few cards.
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
