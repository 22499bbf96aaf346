"""Cards for all processes of a config."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.config.jobs import JobConfig, RlJobConfig
from plimsoll.memory.advise.changes import Move, changed, changes_between
from plimsoll.memory.contents.layout import lay_out
from plimsoll.memory.machine.hardware import Hardware


def on_nodes(hardware: Hardware, config: JobConfig) -> Hardware:
    """As many machines of the same kind as the config names."""
    return replace(hardware, nodes=hardware.nodes[:1] * config.cluster.nodes)


def free_cards(config: JobConfig, hardware: Hardware) -> int:
    """Cards of the config's nodes that no process has; engines that share cards take none."""
    cluster, cards = config.cluster, [len(hardware.nodes[0].cards)] * config.cluster.nodes
    if cluster.device == "cpu" or not any(cards):
        return 0
    if isinstance(config, RlJobConfig) and config.rollout.placement == "shared":
        return max(0, sum(cards) - cluster.ranks - (cluster.critic_ranks or 0))
    return max(0, sum(cards) - lay_out(config, cards).cards_needed)


def with_room(config: JobConfig, move: Move, hardware: Hardware) -> Move:
    """The move with as many nodes as its processes need; none where even many would not do."""
    made = changed(config, changes_between(config, move))
    cards = len(hardware.nodes[0].cards)
    if made is None or not cards:
        return move if made else {}
    nodes = made.cluster.nodes
    needed = -(-lay_out(made, [cards] * nodes).cards_needed // cards)
    for count in range(nodes, max(nodes, needed) + 2):
        if not lay_out(made, [cards] * count).homeless:
            return move if count == nodes else {**move, "cluster.nodes": count}
    return {}
