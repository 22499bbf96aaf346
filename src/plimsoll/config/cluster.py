"""Where roles live."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from plimsoll.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    WrittenPath,
)

Device = Literal["cpu", "cuda"]
RankSleep = Literal["none", "states", "all"]

RankKind = Literal["actor", "critic", "reward"]
"""A group of ranks, named after the kind of role that it is for.

A role lives on the ranks of its group, or on the main ones if its group has no ranks of its own.
"""
MAIN_RANKS: RankKind = "actor"
"""The group of ranks that every run has."""

RANK_KEYS: Mapping[RankKind, str] = MappingProxyType(
    {"actor": "ranks", "critic": "critic_ranks", "reward": "reward_ranks"}
)
"""The setting of `cluster` that has the number of ranks of each kind."""

SHARD_KEYS: Mapping[RankKind, str] = MappingProxyType(
    {kind: key.replace("ranks", "sequence_parallel") for kind, key in RANK_KEYS.items()}
)
"""The setting of `cluster` that has the number of ranks of each kind that share a pack."""

DecidedExchange = Literal["heads", "keys"]

NO_OWN_RANKS: Mapping[str, None] = {
    key: None
    for keys in (RANK_KEYS, SHARD_KEYS)
    for kind, key in keys.items()
    if kind != MAIN_RANKS
}
"""The settings of `cluster` with which all roles share the actor's ranks."""

RankName = Literal["rank", "critic rank", "reward rank"]
RANK_NAMES: Mapping[RankKind, RankName] = MappingProxyType(
    {"actor": "rank", "critic": "critic rank", "reward": "reward rank"}
)
"""The name of a rank of each kind in the plan and the ledger, which is followed by its number."""

NodeGroup = Literal[RankKind, "engines"]
"""What may have nodes of its own: a group of ranks, or all engines."""


class OwnNodes(Settings):
    """How many nodes each group of processes has for itself; the processes are spread evenly."""

    actor: PositiveInt | None = None
    """Nodes of the actor's ranks, which also hold the reference, and the reward models if these
    have no ranks of their own."""
    critic: PositiveInt | None = None
    """Nodes of the critic's own ranks (`cluster.critic_ranks`)."""
    reward: PositiveInt | None = None
    """Nodes of the reward models' own ranks (`cluster.reward_ranks`)."""
    engines: PositiveInt | None = None
    """Nodes of the engines; an engine of several cards has them on one node."""

    @property
    def counts(self) -> dict[NodeGroup, int]:
        """The number of nodes of each group that has its own, in the order of the nodes."""
        groups = get_args(NodeGroup)
        return {name: count for name in groups if (count := getattr(self, name)) is not None}


class ClusterConfig(Settings):
    """One process on a laptop, one node, or many."""

    where: Literal["local", "ray"] = "ray"
    """local: everything in this process, one rank, no Ray; ray: rank actors and engine actors."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if there is a GPU, here or in the Ray cluster that is joined."""
    ranks: PositiveInt = 1
    """Training ranks (data parallel): one per GPU, or CPU processes."""
    critic_ranks: PositiveInt | None = None
    """Ranks of a group of the critic's own, on GPUs of their own; default: the critic shares the
    actor's ranks."""
    reward_ranks: PositiveInt | None = None
    """Ranks of a group of the reward models' own, on GPUs of their own; default: the reward models
    share the actor's ranks."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each pack, for long sequences: a rank holds the activations of its part of
    the pack's tokens, and attention exchanges what it needs. Such ranks are one data-parallel
    stream, so `ranks` must be a multiple."""
    critic_sequence_parallel: PositiveInt | None = None
    """The same for `critic_ranks`, whose packs have as many tokens; default: sequence_parallel."""
    reward_sequence_parallel: PositiveInt | None = None
    """The same for `reward_ranks`, whose packs have as many tokens; default: sequence_parallel."""
    sequence_exchange: Literal["auto", DecidedExchange] = "auto"
    """What ranks that share a pack exchange in each attention: `heads`, after which each has all
    tokens for its share of the heads (Ulysses, https://arxiv.org/abs/2309.14509); `keys`: each gets
    the keys and values of all tokens. auto takes heads if the heads of every model divide."""
    rank_sleep: RankSleep = "none"
    """What ranks move to pinned host memory while engines use their cards: nothing; `states`:
    masters, moments, averages and gradients; `all`: also the weights of every role. For engines
    that share the ranks' cards, and sleep while the ranks train."""
    nodes: PositiveInt = 1
    """Machines of the run; it waits until the Ray cluster has as many."""
    own_nodes: OwnNodes = OwnNodes()
    """Nodes that the ranks of the actor, the critic and the reward models, and the engines, share
    with no other of them; default: Ray packs the ranks, then the engines, on as few nodes as
    possible."""
    hardware: str | None = None
    """The cards of each machine, for the plan, such as 8xA100-80GB; default: the machine at
    hand."""
    host_memory: str | None = None
    """Each machine's host memory, for the plan, such as 1TB; default: the machine at hand."""
    calibration: WrittenPath | None = None
    """A file that `plimsoll calibrate` wrote: constants of the plan, measured on runs of yours."""
    threads: PositiveInt | None = None
    """CPU threads of each rank and engine; default: a machine's cores, or what a cgroup's quota
    leaves of them, divided among its ranks, and among its engines."""
    address: str | None = None
    """A running Ray cluster's address; default: a cluster of this machine alone,
    ended with the run."""
    memory_halvings: NonNegativeInt = 3
    """How often the micro-batches of a role may be halved because memory ran out while a rank
    trained on one of them. The optimizer step is then done anew with the smaller ones, and its
    gradient is the same. An engine that runs out of memory is started again for half as many
    sequences at once, as often. 0: the run ends at the first shortage, and ranks do not vote before
    each of their collectives."""
    least_free_memory: Probability = 0.02
    """The share of a node's host memory below which the run saves after the step and stops, before
    the kernel kills a process; 0: never."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that nodes may take to join, and processes to start."""
    hang_timeout: NonNegativeFloat | None = None
    """Seconds without an answer after which a rank or engine counts as hanging, and is ended; the
    same holds for a run in which no process works. 0: never. Default: 5 times the longest silence
    of this kind of work so far in the run, at least 60; 600 for what is done for the first time,
    for loading and for saving; for the run's own process, which its command watches, 300."""

    @property
    def rank_counts(self) -> dict[RankKind, int]:
        """The number of ranks of each group that the run has, the actor's first."""
        return {kind: n for kind, key in RANK_KEYS.items() if (n := getattr(self, key)) is not None}

    @property
    def own_ranks(self) -> dict[RankKind, int]:
        """The number of ranks of each kind of role that has ranks of its own."""
        return {kind: count for kind, count in self.rank_counts.items() if kind != MAIN_RANKS}

    def shards_of(self, kind: RankKind) -> int:
        """Return the number of ranks of a kind that share a pack."""
        own: int | None = getattr(self, SHARD_KEYS[kind])
        return self.sequence_parallel if own is None else own

    @property
    def all_ranks(self) -> int:
        """The number of ranks of all groups."""
        return sum(self.rank_counts.values())

    def nodes_of(self, group: NodeGroup) -> range:
        """Return the numbers of the nodes, counted from 0, on which a group's processes may run.

        Groups with their own nodes have the first ones, in the order of `own_nodes`.
        """
        first = 0
        for name, count in self.own_nodes.counts.items():
            if name == group:
                return range(first, first + count)
            first += count
        return range(self.nodes)

    def node_of(self, group: NodeGroup, index: int, count: int) -> int:
        """Return the number of the node of process `index` of `count`, which are spread evenly."""
        nodes = self.nodes_of(group)
        return nodes[index * len(nodes) // count]


def decided_exchange(cluster: ClusterConfig) -> DecidedExchange:
    """Return what ranks of a resolved run that share a pack exchange."""
    assert cluster.sequence_exchange != "auto", "of a run that is resolved"
    return cluster.sequence_exchange


def device_of(cluster: ClusterConfig) -> Device:
    """Return the device that a resolved run computes on."""
    assert cluster.device != "auto", "of a run that is resolved"
    return cluster.device
