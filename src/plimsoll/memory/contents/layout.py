"""The node, and the card if any, on which each process of a run is placed.

Ranks fill the nodes card by card: first the actor's group, then the groups of the critic and of the
reward models if they have one. Engines follow; all cards of an engine are on one node. With
`rollout.placement: shared` engines begin again at the first rank's card, and use only ranks' cards.
With `cluster.own_nodes` each group is spread evenly over its own nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from plimsoll.config.cluster import RANK_NAMES, ClusterConfig, RankName
from plimsoll.config.rollout import RolloutConfig
from plimsoll.resolve.run_spec import RunSpec

ProcessKind = Literal["local", "controller", "ray", RankName, "engine", "engine worker"]


@dataclass(frozen=True, order=True)
class Slot:
    """A card of a node, or the node alone (card None), both counted from 0."""

    node: int
    card: int | None = None


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
class Layout:
    """The places of a run's processes."""

    processes: tuple[Process, ...]
    """The processes that have a place."""
    unplaced: tuple[str, ...]
    """The names of processes without a free card."""
    cards_needed: int


def lay_out(spec: RunSpec[Any], cards: Sequence[int]) -> Layout:
    """Return the places of a run's processes; `cards` counts the cards of each node (0 on CPU)."""
    cluster = spec.cluster
    rollout = spec.engines
    if cluster.where == "local":
        slot = Slot(0, 0 if cards[0] else None)
        return Layout((Process("local", 0, slot),), (), 1 if cards[0] else 0)
    ray = [Process("ray", node, Slot(node)) for node in range(len(cards))]
    always = (Process("controller", 0, Slot(0)), *ray)
    if not any(cards):
        workers = tuple(_without_cards(cluster, rollout))
        return Layout((*always, *workers), (), 0)
    free = [Slot(node, card) for node, count in enumerate(cards) for card in range(count)]
    ranks, left = _ranks(cluster, free)
    shared = rollout is not None and rollout.placement == "shared"
    on_ranks = [process.slot for _, process in ranks if process is not None]
    engines = _engines(cluster, rollout, on_ranks if shared else left)
    placed = [*ranks, *engines]
    unplaced = tuple(name for name, process in placed if process is None)
    processes = tuple(process for _, process in placed if process is not None)
    return Layout((*always, *processes), unplaced, _cards_needed(cluster, rollout))


Placed = tuple[str, Process | None]
"""The name of a process, and the process if there is a card for it."""


def _ranks(cluster: ClusterConfig, free: Sequence[Slot]) -> tuple[list[Placed], list[Slot]]:
    """Return the ranks of all groups, and the cards that they leave free."""
    apart = bool(cluster.own_nodes.counts)
    pools = {node: iter([*slots]) for node, slots in groupby(free, lambda s: s.node * apart)}
    placed: list[Placed] = []
    for name, index, node in _rank_nodes(cluster):
        slot = next(pools.get(node * apart, iter(())), None)
        process = None if slot is None else Process(name, index, slot)
        placed.append((f"{name} {index}", process))
    return placed, [slot for pool in pools.values() for slot in pool]


def _rank_nodes(cluster: ClusterConfig) -> Iterator[tuple[RankName, int, int]]:
    """Yield name, number and node of each rank, if each group is spread evenly over its nodes."""
    for kind, count in cluster.rank_counts.items():
        for index in range(count):
            yield RANK_NAMES[kind], index, cluster.node_of(kind, index, count)


def _engines(
    cluster: ClusterConfig, rollout: RolloutConfig | None, free: Sequence[Slot]
) -> Iterator[Placed]:
    """Yield each engine on the next cards of one node: its front, and a worker on each card."""
    left = list(free)
    for index in range(rollout.engines if rollout else 0):
        assert rollout is not None
        room = left
        if cluster.own_nodes.engines:
            node = cluster.node_of("engines", index, rollout.engines)
            room = [slot for slot in left if slot.node == node]
        slots = _on_one_node(room, rollout.parts)
        if not slots:
            yield f"engine {index}", None
            continue
        left = left[left.index(slots[-1]) + 1 :]
        if not rollout.engine.has_front:
            yield f"engine {index}", Process("engine", index, slots[0])
            continue
        yield f"engine {index}", Process("engine", index, Slot(slots[0].node))
        for part, slot in enumerate(slots):
            worker = Process("engine worker", index, slot, part)
            yield worker.name, worker


def _on_one_node(free: Sequence[Slot], count: int) -> list[Slot]:
    """Return the first `count` successive cards of one node; none if no node has so many."""
    for start in range(len(free) - count + 1):
        chosen = free[start : start + count]
        if chosen[0].node == chosen[-1].node:
            return list(chosen)
    return []


def _without_cards(cluster: ClusterConfig, rollout: RolloutConfig | None) -> Iterator[Process]:
    """Yield ranks and engines as CPU processes, each kind spread evenly over its nodes."""
    for name, index, node in _rank_nodes(cluster):
        yield Process(name, index, Slot(node))
    for index in range(rollout.engines if rollout else 0):
        assert rollout is not None
        slot = Slot(cluster.node_of("engines", index, rollout.engines))
        yield Process("engine", index, slot)
        if rollout.parts > 1:
            for part in range(rollout.parts):
                yield Process("engine worker", index, slot, part)


def _cards_needed(cluster: ClusterConfig, rollout: RolloutConfig | None) -> int:
    ranks = cluster.all_ranks
    engines = rollout.all_parts if rollout else 0
    shared = rollout is not None and rollout.placement == "shared"
    return max(ranks, engines) if shared else ranks + engines
