"""The node, and the card if any, on which each process of a run is placed.

Ranks fill the nodes card by card: first the actor's group, then the groups of the critic and of the
reward models if they have one. Engines follow; all cards of an engine are on one node. With
`rollout.placement: shared` engines begin again at the first rank's card, and use only ranks' cards.
With `cluster.own_nodes` each group is spread evenly over its own nodes.

A cluster of thousands of cards has few kinds of nodes. So a layout lists the processes of one node
of each kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any, Literal

from plimsoll.config.cluster import RANK_NAMES, ClusterConfig, NodeGroup, RankName
from plimsoll.config.rollout import RolloutConfig
from plimsoll.resolve.run_spec import RunSpec

ProcessKind = Literal["local", "controller", "ray", RankName, "engine", "engine worker"]


@dataclass(frozen=True, order=True)
class Slot:
    """A card of a node, or the node alone (card None), both counted from 0."""

    node: int
    card: int | None = None


EqualSlots = tuple[tuple[int, ...], int | None]
"""The nodes on which a card, or the host (card None), holds the same; and the card's number."""


@dataclass(frozen=True)
class Process:
    """One operating-system process.

    Attributes:
        kind: `local` is the whole run in one process, with rank 0 and the sampler in it;
            `controller` is the process that runs the loop; `ray` is all that Ray itself runs on
            a node; `engine` is an engine's front, and its model too if it has no `engine worker`.
        index: the number of the rank in its group, of the engine, or of the node (ray).
        part: the number of a worker among the workers of its engine.
    """

    kind: ProcessKind
    index: int
    slot: Slot
    part: int = 0

    @property
    def samples(self) -> bool:
        """Whether the process has an engine, or a part of one."""
        return self.kind in ("local", "engine", "engine worker")

    @property
    def name(self) -> str:
        """The name of the process, such as `rank 3` or `engine 0 worker 1`."""
        if self.kind == "engine worker":
            return f"engine {self.index} worker {self.part}"
        return self.kind if self.kind in ("local", "controller") else f"{self.kind} {self.index}"


@dataclass(frozen=True)
class NodeKind:
    """Nodes with the same kinds of processes on the same cards."""

    nodes: tuple[int, ...]
    """The numbers of these nodes, ascending."""
    processes: tuple[Process, ...]
    """The processes of the first of these nodes; they stand for those of the others."""


@dataclass(frozen=True)
class Layout:
    """The places of a run's processes."""

    kinds: tuple[NodeKind, ...]
    """The kinds of nodes, in the order of their first nodes."""
    unplaced: tuple[str, ...]
    """The names of processes without a free card."""
    cards_needed: int

    @property
    def processes(self) -> Iterator[Process]:
        """Every process with a place, node by node: each node has the next ones of each group."""
        missing, numbers = {*self.unplaced}, defaultdict[ProcessKind, Iterator[int]](count)
        by_node = {node: kind for kind in self.kinds for node in kind.nodes}
        for node, kind in sorted(by_node.items()):
            index = 0
            for process in kind.processes:
                if process.kind != "engine worker":  # its engine's front is before it
                    left = numbers[process.kind]
                    index = next(i for i in left if f"{process.kind} {i}" not in missing)
                yield replace(process, index=index, slot=replace(process.slot, node=node))


def lay_out(spec: RunSpec[Any], cards: int, nodes: int = 1) -> Layout:
    """Return the places of a run's processes on `nodes` nodes of `cards` cards (0 on CPU) each."""
    cluster, rollout = spec.cluster, spec.engines
    if cluster.where == "local":
        alone = Process("local", 0, Slot(0, 0 if cards else None))
        return Layout((NodeKind((0,), (alone,)),), (), 1 if cards else 0)
    placed: dict[NodeGroup, set[int]] = {group: set() for group in _groups(spec)}
    kinds: dict[object, tuple[list[int], tuple[Process, ...]]] = {}
    for node, shares in enumerate(_shares(spec, cards, nodes)):
        for group, share in shares.items():
            placed[group].update(share)
        # The first node alone has the controller, and the first of a group may do more than others.
        kind = node == 0, *((group, len(r), r.start == 0) for group, r in shares.items())
        if kind not in kinds:
            kinds[kind] = [], tuple(_processes(rollout, cards, node, shares))
        kinds[kind][0].append(node)
    unplaced = (
        f"{_NAMES[group]} {index}"
        for group, number in _groups(spec).items()
        for index in range(number)
        if index not in placed[group]
    )
    return Layout(
        tuple(NodeKind(tuple(numbers), processes) for numbers, processes in kinds.values()),
        tuple(unplaced) if cards else (),
        _cards_needed(cluster, rollout) if cards else 0,
    )


_NAMES = dict[NodeGroup, Literal[RankName, "engine"]](RANK_NAMES.items()) | {"engines": "engine"}
"""The kinds of the processes of each group."""


def _groups(spec: RunSpec[Any]) -> dict[NodeGroup, int]:
    """Return how many ranks each group has, and how many engines there are."""
    groups = dict[NodeGroup, int](spec.cluster.rank_counts.items())
    return groups | ({"engines": spec.engines.engines} if spec.engines else {})


def _shares(spec: RunSpec[Any], cards: int, nodes: int) -> Iterator[dict[NodeGroup, range]]:
    """Yield for each node its ranks of each group, and its engines, by their numbers."""
    cluster, rollout, groups = spec.cluster, spec.engines, _groups(spec)
    apart, ends = cluster.own_nodes.counts, dict.fromkeys(groups, 0)
    parts = rollout.parts if rollout else 1
    shared = rollout is not None and rollout.placement == "shared"
    for node in range(nodes):
        shares, free = dict[NodeGroup, range](), cards
        for group, number in groups.items():
            spread, room = bool(apart), free
            if group == "engines":
                spread, room = group in apart, (cards - free if shared else free) // parts
            if spread or not cards:
                wanted = _even_share(cluster.nodes_of(group), node, number)
            else:
                wanted = range(ends[group], number)
            if share := wanted[:room] if cards else wanted:
                shares[group], ends[group] = share, share.stop
                free -= len(share)
        yield shares


def _even_share(nodes: range, node: int, number: int) -> range:
    """Return which of `number` processes are on a node if they are spread evenly over `nodes`.

    As `ClusterConfig.node_of` says.
    """
    if node not in nodes:
        return range(0)
    place = nodes.index(node)
    return range(-(-place * number // len(nodes)), -(-(place + 1) * number // len(nodes)))


def _processes(
    rollout: RolloutConfig | None, cards: int, node: int, shares: Mapping[NodeGroup, range]
) -> Iterator[Process]:
    """Yield the processes of a node; an engine has its front, and a worker on each card."""
    host = Slot(node)
    if node == 0:
        yield Process("controller", 0, host)
    yield Process("ray", node, host)
    slots = _slots(node, cards)
    for group, share in shares.items():
        if group != "engines":
            yield from (Process(_NAMES[group], index, next(slots)) for index in share)
    if rollout is None:
        return
    if rollout.placement == "shared":
        slots = _slots(node, cards)
    has_workers = rollout.engine.has_front if cards else rollout.parts > 1
    for index in shares.get("engines", ()):
        own = [next(slots) for _ in range(rollout.parts)]
        yield Process("engine", index, host if has_workers else own[0])
        for part, slot in enumerate(own if has_workers else ()):
            yield Process("engine worker", index, slot, part)


def _slots(node: int, cards: int) -> Iterator[Slot]:
    """Return the cards of a node, or its host for ever if it has none."""
    return (Slot(node, card) for card in range(cards)) if cards else repeat(Slot(node))


def _cards_needed(cluster: ClusterConfig, rollout: RolloutConfig | None) -> int:
    ranks = cluster.all_ranks
    engines = rollout.all_parts if rollout else 0
    shared = rollout is not None and rollout.placement == "shared"
    return max(ranks, engines) if shared else ranks + engines
