"""The node of each CPU process, and the cards of engines that share the ranks' cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from plimsoll.errors import SettingsConflict
from plimsoll.run.counting import counted


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
    std::sort), and DeepSpeed takes neighbours for ranks of one node (`zero.hpz_partition_size`).
    """
    return sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i]))


def shared_placement(ranks: Sequence[NodeCards], engines: int, parts: int) -> list[NodeCards]:
    """Return cards for each engine, `parts` of one node, in the order of the ranks; no card twice.

    `ranks` are each rank's own cards.

    Raises:
        SettingsConflict: The ranks' cards are too few.
    """
    placement = list(islice(_placement(ranks, parts), engines))
    if len(placement) < engines:
        raise SettingsConflict(
            f"rollout.placement is shared, and {counted(engines, 'engine')} (rollout.engines) of "
            f"{counted(parts, 'card')} each (rollout.vllm.tensor_parallel x "
            f"rollout.vllm.pipeline_parallel) cannot find room on the cards of "
            f"{counted(len(ranks), 'training rank')}: there is room for {len(placement)}. An "
            "engine's cards must be of one node. Ask for fewer engines, or write "
            "rollout.placement: own"
        )
    return placement


def _placement(ranks: Sequence[NodeCards], parts: int) -> Iterator[NodeCards]:
    for node_id, group in groupby(sorted(ranks), key=lambda place: place.node_id):
        cards = [card for place in group for card in place.cards]
        for start in range(0, len(cards) - parts + 1, parts):
            yield NodeCards(node_id, tuple(cards[start : start + parts]))
