"""What may be changed in a config so that it needs less memory, or, with room to spare, is faster.

A move is a few keys with new values that make sense together. It is tried, not proved: a search
keeps those after which less is lacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import ComparedJobConfig, JobConfig, RlJobConfig
from plimsoll.config.roles import frozen_roles, key_of, trained_roles
from plimsoll.memory.advise.changes import Value, changed, changes_between
from plimsoll.memory.contents.layout import lay_out
from plimsoll.memory.contents.stores import Store, likely_worst
from plimsoll.memory.items import Item
from plimsoll.memory.machine.hardware import Hardware
from plimsoll.memory.plan.plan import Load
from plimsoll.memory.price.work import longest_sequence, sequences_together, step_sequences
from plimsoll.memory.rules.engines import largest_share
from plimsoll.memory.rules.states import LOST_BELOW
from plimsoll.memory.rules.ways_out import written_reference

Move = Mapping[str, Value]
"""Dotted keys and what they become."""

ADAPTER_RANK = 16
_CHUNK = 256
"""Rows of logits at once: fewer save little more."""
LARGEST_SHARE = 0.9
"""Of a card, for vLLM: its own default."""


def saving_moves(config: JobConfig, load: Load, hardware: Hardware) -> Iterator[Move]:
    """Those that need less of something. load: of the config."""
    yield from _smaller_micro_batches(config)
    for trained in (*_TRAINED, _adapter, _quantised):
        yield _of_trained(config, trained)
    for frozen in _FROZEN:
        yield _of_frozen(config, frozen)
    if isinstance(config, ComparedJobConfig) and "reference" in frozen_roles(config):
        yield {"reference_logprobs.precompute": True}
    if isinstance(config, RlJobConfig) and config.cluster.where == "ray":
        yield from _engine_moves(config, load, hardware)
    if config.cluster.where == "ray":
        yield from _cluster_moves(config, hardware)


def faster_moves(config: JobConfig, hardware: Hardware) -> Iterator[Move]:
    """Those that need more memory, or more cards, and less time."""
    for factor in (2, 4):
        yield {"batch.micro_batch_tokens": factor * config.batch.micro_batch_tokens}
    for trained in _FASTER:
        yield _of_trained(config, trained)
    yield _of_frozen(config, lambda _: {"offload": "none"})
    if config.cluster.where == "ray":
        yield filled(config, hardware)


def filled(config: JobConfig, hardware: Hardware) -> Move:
    """Ranks on the cards that the run leaves free, as far as each gets a sequence (or pair); where
    the critic has ranks of its own, none."""
    cluster = config.cluster
    work = step_sequences(config) // sequences_together(config)
    ranks = min(cluster.ranks + _free_cards(config, hardware), work)
    more = cluster.critic_ranks is None and ranks > cluster.ranks
    return {"cluster.ranks": ranks} if more else {}


def _free_cards(config: JobConfig, hardware: Hardware) -> int:
    cards = [len(hardware.nodes[0].cards)] * config.cluster.nodes
    if config.cluster.device == "cpu" or not any(cards):
        return 0
    return max(0, sum(cards) - lay_out(config, cards).cards_needed)


def grown(config: JobConfig, hardware: Hardware, steps: int) -> Move:
    """More nodes (fewer where steps is below 0) with ranks on all their cards; one for each group
    of ranks at a step."""
    cluster, cards = config.cluster, len(hardware.nodes[0].cards)
    each = cards or max(1, cluster.ranks // cluster.nodes)
    if cluster.critic_ranks is None:
        ranks = cluster.ranks + _free_cards(config, hardware) + steps * each
        ranks = ranks if steps > 0 else min(ranks, cluster.ranks)
        return {"cluster.ranks": ranks, "cluster.nodes": cluster.nodes + steps}
    return {
        "cluster.ranks": cluster.ranks + steps * each,
        "cluster.critic_ranks": cluster.critic_ranks + steps * each,
        "cluster.nodes": cluster.nodes + 2 * steps,
    }


def on_nodes(hardware: Hardware, config: JobConfig) -> Hardware:
    """As many machines of the same kind as the config names."""
    return replace(hardware, nodes=hardware.nodes[:1] * config.cluster.nodes)


def _smaller_micro_batches(config: JobConfig) -> Iterator[Move]:
    """Half the budget and so on, down to the longest sequence (or pair)."""
    least = longest_sequence(config) * sequences_together(config)
    tokens = config.batch.micro_batch_tokens
    while tokens > least:
        tokens = max(tokens // 2, least)
        yield {"batch.micro_batch_tokens": tokens}


TrainedMove = Callable[[TrainedRole], Move]
FrozenMove = Callable[[FrozenRole], Move]


def _adapter(role: TrainedRole) -> Move:
    return {"adapter.rank": ADAPTER_RANK} if role.adapter is None else {}


def _quantised(role: TrainedRole) -> Move:
    return {**_adapter(role), "model.quantization": "nf4"}


def _smaller_chunks(role: TrainedRole) -> Move:
    return {"model.head_chunk": min(_CHUNK, role.model.head_chunk)}


def _moments_in_8_bits(role: TrainedRole) -> Move:
    offloaded = role.zero.optimizer_offload == "cpu"
    return {} if offloaded else {"optimizer.kind": "adamw_8bit"}


def _narrow_gradients(role: TrainedRole) -> Move:
    wide = role.zero.stage > 0 and role.model.dtype == "bfloat16"
    return {"zero.gradient_dtype": "bfloat16"} if wide else {}


def _narrow_states(role: TrainedRole) -> Move:
    """Not where the learning rate is one whose updates bfloat16 would lose."""
    wide = role.zero.stage > 0 and role.model.dtype == "bfloat16"
    if not wide or role.optimizer.learning_rate < LOST_BELOW:
        return {}
    return {"zero.stage": max(2, role.zero.stage), "zero.state_dtype": "bfloat16"}


def _layer_inputs_on_host(_: TrainedRole) -> Move:
    return {
        "model.gradient_checkpointing": True,
        "model.checkpoint_every": 1,
        "model.activation_offload": "cpu",
    }


def _recomputes_all(role: TrainedRole) -> bool:
    return role.model.gradient_checkpointing is True


_TRAINED: tuple[TrainedMove, ...] = (
    lambda role: {"zero.stage": max(2, role.zero.stage)},
    lambda _: {"zero.stage": 3},
    lambda _: {"model.gradient_checkpointing": True, "model.checkpoint_every": 1},
    lambda _: {"model.gradient_checkpointing": True, "model.checkpoint_every": 2},
    lambda _: {"model.gradient_checkpointing": "selective", "model.checkpoint_every": 1},
    _layer_inputs_on_host,
    _smaller_chunks,
    _narrow_gradients,
    _narrow_states,
    _moments_in_8_bits,
    lambda role: {"zero.stage": max(1, role.zero.stage), "zero.optimizer_offload": "cpu"},
    lambda _: {"zero.stage": 3, "zero.parameter_offload": "cpu"},
)
_FASTER: tuple[TrainedMove, ...] = (
    lambda _: {"zero.optimizer_offload": "none"},
    lambda _: {"zero.parameter_offload": "none"},
    lambda _: {"model.activation_offload": "none"},
    lambda _: {
        "model.gradient_checkpointing": False,
        "model.checkpoint_every": 1,
        "model.activation_offload": "none",
    },
    lambda role: {"model.gradient_checkpointing": "selective"} if _recomputes_all(role) else {},
    lambda role: {"zero.stage": min(2, role.zero.stage), "zero.parameter_offload": "none"},
)
_FROZEN: tuple[FrozenMove, ...] = (
    lambda role: {"offload": "cpu"},
    lambda role: {"stage": 3},
    lambda role: {"stage": 3, "offload": "cpu"},
    lambda role: {"offload": "none"},
)


def _of_trained(config: JobConfig, move: TrainedMove) -> Move:
    """The move made by all roles that learn."""
    return {
        f"{name}.{key}": value
        for name, role in trained_roles(config).items()
        for key, value in move(role).items()
    }


def _of_frozen(config: JobConfig, move: FrozenMove) -> Move:
    """The move made by all models that only score."""
    found: dict[str, Value] = {}
    for name, role in frozen_roles(config).items():
        key = key_of(name)
        made = {f"{key}.{option}": value for option, value in move(role).items()}
        if changes_between(config, made) and name == "reference":
            made |= written_reference(config)
        found |= made
    return found


def _engine_moves(config: RlJobConfig, load: Load, hardware: Hardware) -> Iterator[Move]:
    rollout = config.rollout
    if rollout.engine == "vllm" and hardware.nodes[0].cards:
        yield from _shares(config, load)
    elif rollout.engine == "vllm":
        yield from _caches(config, load)
    other = "own" if rollout.placement == "shared" else "shared"
    moved: Move = {"rollout.placement": other}
    if other == "own":
        moved = {**moved, "rollout.sleep_level": 0}
    yield with_room(config, moved, hardware)


def _shares(config: RlJobConfig, load: Load) -> Iterator[Move]:
    """The shares of a card that the ranks leave, awake and asleep; a larger one where the engine's
    weights or KV cache lack room."""
    rollout = config.rollout
    if any(problem.code == "vllm-share" for problem in load.problems):
        yield {"rollout.memory_share": LARGEST_SHARE}
    if rollout.placement != "shared":
        return
    beside = [store.without(_is_engine) for store in load.devices if _has_both(store)]
    for level in (0, 1, 2):
        shares = (largest_share(store, load.band, asleep=level > 0) for store in beside)
        share = min((*shares, LARGEST_SHARE))
        if share > 0:
            yield {"rollout.sleep_level": level, "rollout.memory_share": share}


def _caches(config: RlJobConfig, load: Load) -> Iterator[Move]:
    """The KV cache for which everything else on the hosts leaves room, in halves of a GiB."""
    rooms = [
        store.capacity - likely_worst(store.without(_is_cache).peak, load.band)
        for store in load.hosts
        if store.capacity is not None and any(_is_cache(one.item) for one in store.held)
    ]
    halves = min(rooms, default=0) // (config.rollout.engines * 2**29)
    if 0 < halves / 2 < config.rollout.cpu_kv_cache_gib:
        yield {"rollout.cpu_kv_cache_gib": halves / 2}


def _is_cache(item: Item) -> bool:
    return (item.role, item.name) == ("rollout", "KV cache")


def _has_both(store: Store) -> bool:
    return {True, False} == {one.item.role == "rollout" for one in store.held}


def _is_engine(item: Item) -> bool:
    return item.role == "rollout"


def _cluster_moves(config: JobConfig, hardware: Hardware) -> Iterator[Move]:
    """Ranks on cards that are free; more on another node; as many as there are cards; nodes for
    all; the critic on ranks of its own."""
    cluster, cards = config.cluster, len(hardware.nodes[0].cards)
    yield filled(config, hardware)
    yield grown(config, hardware, 1)
    if not cards:
        return
    yield {"cluster.ranks": min(cluster.ranks, cluster.nodes * cards)}
    yield with_room(config, {}, hardware)
    if "critic" in trained_roles(config) and cluster.critic_ranks is None:
        yield with_room(config, {"cluster.critic_ranks": cluster.ranks}, hardware)


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
