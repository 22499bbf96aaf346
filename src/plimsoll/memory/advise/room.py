"""Cards for all processes of a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.machine.hardware import Hardware
from plimsoll.memory.contents.layout import lay_out
from plimsoll.memory.remedies.changes import Move, changed, changes_between
from plimsoll.spec.run_spec import RunSpec


def on_nodes(hardware: Hardware, spec: RunSpec[Any]) -> Hardware:
    """As many machines of the same kind as the config names."""
    return replace(hardware, nodes=hardware.nodes[:1] * spec.cluster.nodes)


def free_cards(spec: RunSpec[Any], hardware: Hardware) -> int:
    """Cards of the config's nodes that no process has; engines that share cards take none."""
    cluster, cards = spec.cluster, [len(hardware.nodes[0].cards)] * spec.cluster.nodes
    if cluster.device == "cpu" or not any(cards):
        return 0
    if spec.engines and spec.engines.placement == "shared":
        return max(0, sum(cards) - cluster.ranks - (cluster.critic_ranks or 0))
    return max(0, sum(cards) - lay_out(spec, cards).cards_needed)


def with_room(spec: RunSpec[Any], move: Move, hardware: Hardware) -> Move:
    """The move with as many nodes as its processes need; none where even many would not do."""
    made = changed(spec, changes_between(spec, move))
    cards = len(hardware.nodes[0].cards)
    if made is None or not cards:
        return move if made else {}
    nodes = made.cluster.nodes
    needed = -(-lay_out(made, [cards] * nodes).cards_needed // cards)
    for count in range(nodes, max(nodes, needed) + 2):
        if not lay_out(made, [cards] * count).unplaced:
            return move if count == nodes else {**move, "cluster.nodes": count}
    return {}
