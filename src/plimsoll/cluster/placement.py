"""Choose the nodes and cards of a run's processes, and describe what a cluster lacks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod
from types import MappingProxyType

from plimsoll.config.cluster import MAIN_RANKS, RANK_NAMES, ClusterConfig, NodeGroup
from plimsoll.errors import SettingsConflict
from plimsoll.run.numbers import plural

PROCESS_NAMES: Mapping[NodeGroup, str] = MappingProxyType(
    {**dict(RANK_NAMES.items()), MAIN_RANKS: "training rank", "engines": "rollout engine"}
)
"""The name of a process of each group in messages."""


@dataclass(frozen=True, order=True)
class NodeCards:
    """A Ray node and cards of it, by their names there (see `Host`); no cards on CPU."""

    node_id: str
    cards: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """What the processes of one group ask of a cluster.

    Attributes:
        group: the group.
        count: the number of its processes.
        cards: the cards of each process, which are on one node.
    """

    group: NodeGroup
    count: int
    cards: int = 1

    @property
    def title(self) -> str:
        """The processes, for messages, such as `8 training ranks`."""
        each = f" of {self.cards} cards each" if self.cards > 1 else ""
        return f"{plural(self.count, PROCESS_NAMES[self.group])}{each}"


@dataclass(frozen=True)
class Reservation:
    """Cards that Ray reserves together: all of them, or none.

    Attributes:
        claims: the groups that get them.
        bundles: the number of cards of each bundle, which are on one node.
        apart: whether each bundle is on a node of its own; otherwise bundles are on as few nodes as
            possible.
        seats: for each claim, the number of each process's bundle.
    """

    claims: tuple[Claim, ...]
    bundles: tuple[int, ...]
    apart: bool
    seats: tuple[tuple[int, ...], ...]

    def without_room(self, free: Sequence[int]) -> list[int]:
        """Return the bundles that find no room; `free` counts each node's free cards."""
        room, left = sorted(free, reverse=True), []
        for bundle in sorted(self.bundles, reverse=True):
            node = next((i for i, cards in enumerate(room) if cards >= bundle), None)
            if node is None:
                left.append(bundle)
            else:
                room[node] = 0 if self.apart else room[node] - bundle
        return left


def reservations(cluster: ClusterConfig, claims: Sequence[Claim]) -> list[Reservation]:
    """Return what to reserve for a run, in the order in which to ask for it.

    Groups come one after the other, so that engines take no card of a node that ranks would fill.
    Groups with nodes of their own come together, because Ray keeps only the bundles of one
    reservation apart.
    """
    if not cluster.own_nodes.counts:
        ones = [(c, tuple(range(c.count))) for c in claims]
        return [Reservation((c,), (c.cards,) * c.count, False, (seats,)) for c, seats in ones]
    seats = tuple(
        tuple(cluster.node_of(c.group, i, c.count) for i in range(c.count)) for c in claims
    )
    cards = Counter[int]()
    for claim, nodes in zip(claims, seats, strict=True):
        cards.update({node: count * claim.cards for node, count in Counter(nodes).items()})
    bundles = tuple(cards[node] for node in sorted(cards))
    return [Reservation(tuple(claims), bundles, True, seats)]


@dataclass(frozen=True)
class NodeSupply:
    """The cards of a node: all, and those that are free."""

    address: str
    total: int
    free: int


def describe_shortage(
    reservation: Reservation, nodes: Sequence[NodeSupply], holdings: Iterable[str]
) -> str:
    """Return which cards are asked for, which are there, which are missing, and who holds others.

    `holdings` are lines on the latter. The text says, too, if cards are missing even when nobody
    holds any.
    """
    missing = reservation.without_room([node.free for node in nodes])
    never = reservation.without_room([node.total for node in nodes])
    asked = [f"{' and '.join(c.title for c in reservation.claims)}: {_count(reservation.bundles)}"]
    if reservation.apart:
        asked += ["each of them on a node of its own"]
    there = [
        f"{node.address} has {node.free} of {plural(node.total, 'GPU')} free" for node in nodes
    ]
    parts = [
        f"asked for {', '.join(asked)}",
        f"there: {'; '.join(there) or 'no node'}",
        f"missing: {_count(missing)}" if missing else "Ray has not placed them yet",
        *(["that is missing even if nobody else holds a GPU"] if never else []),
        *holdings,
    ]
    return "\n  ".join(parts)


def _count(bundles: Sequence[int]) -> str:
    """Return bundles as text, such as `2 x 4 GPUs on one node`."""
    counts = sorted(Counter(bundles).items(), reverse=True)
    return " and ".join(
        plural(number, "GPU") if cards == 1 else f"{number} x {cards} GPUs on one node"
        for cards, number in counts
    )


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
