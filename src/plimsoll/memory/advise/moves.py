"""What may be changed in a config so that it needs less memory, or, with room to spare, is faster.

A move is a few keys with new values that make sense together. It is tried, not proved: a search
keeps those after which less is lacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.hardware import Hardware
from plimsoll.memory.advise.changes import Value, changed, changes_between
from plimsoll.memory.contents.layout import lay_out
from plimsoll.memory.contents.stores import Store, likely_worst
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.rules.engines import largest_share
from plimsoll.memory.rules.states import LOST_BELOW
from plimsoll.memory.rules.ways_out import written_reference
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.items import Item

Move = Mapping[str, Value]
"""Dotted keys and what they become."""

ADAPTER_RANK = 16
_CHUNK = 256
"""Rows of logits at once: fewer save little more."""
LARGEST_SHARE = 0.9
"""Of a card, for vLLM: its own default."""


def saving_moves(spec: RunSpec[Any], plan: Plan, hardware: Hardware) -> Iterator[Move]:
    """Those that need less of something. plan: of the config."""
    yield from _smaller_micro_batches(spec)
    for trained in (*_TRAINED, _adapter, _quantised):
        yield _of_trained(spec, trained)
    for frozen in _FROZEN:
        yield _of_frozen(spec, frozen)
    if spec.may_precompute and "reference" in spec.frozen:
        yield {"reference_logprobs.precompute": True}
    if spec.sampling is not None and spec.cluster.where == "ray":
        yield from _engine_moves(spec, plan, hardware)
    if spec.cluster.where == "ray":
        yield from _cluster_moves(spec, hardware)


def faster_moves(spec: RunSpec[Any], hardware: Hardware) -> Iterator[Move]:
    """Those that need more memory, or more cards, and less time."""
    for factor in (2, 4):
        yield {"batch.micro_batch_tokens": factor * spec.workload.budget}
    for trained in _FASTER:
        yield _of_trained(spec, trained)
    yield _of_frozen(spec, lambda _: {"offload": "none"})
    if spec.cluster.where == "ray":
        yield filled(spec, hardware)


def filled(spec: RunSpec[Any], hardware: Hardware) -> Move:
    """Ranks on the cards that the run leaves free, as far as each gets a sequence (or pair); where
    the critic has ranks of its own, none."""
    cluster = spec.cluster
    work = spec.workload.units
    ranks = min(cluster.ranks + _free_cards(spec, hardware), work)
    more = cluster.critic_ranks is None and ranks > cluster.ranks
    return {"cluster.ranks": ranks} if more else {}


def _free_cards(spec: RunSpec[Any], hardware: Hardware) -> int:
    cards = [len(hardware.nodes[0].cards)] * spec.cluster.nodes
    if spec.cluster.device == "cpu" or not any(cards):
        return 0
    return max(0, sum(cards) - lay_out(spec, cards).cards_needed)


def grown(spec: RunSpec[Any], hardware: Hardware, steps: int) -> Move:
    """More nodes (fewer where steps is below 0) with ranks on all their cards; one for each group
    of ranks at a step."""
    cluster, cards = spec.cluster, len(hardware.nodes[0].cards)
    each = cards or max(1, cluster.ranks // cluster.nodes)
    if cluster.critic_ranks is None:
        ranks = cluster.ranks + _free_cards(spec, hardware) + steps * each
        ranks = ranks if steps > 0 else min(ranks, cluster.ranks)
        return {"cluster.ranks": ranks, "cluster.nodes": cluster.nodes + steps}
    return {
        "cluster.ranks": cluster.ranks + steps * each,
        "cluster.critic_ranks": cluster.critic_ranks + steps * each,
        "cluster.nodes": cluster.nodes + 2 * steps,
    }


def on_nodes(hardware: Hardware, spec: RunSpec[Any]) -> Hardware:
    """As many machines of the same kind as the config names."""
    return replace(hardware, nodes=hardware.nodes[:1] * spec.cluster.nodes)


def _smaller_micro_batches(spec: RunSpec[Any]) -> Iterator[Move]:
    """Half the budget and so on, down to the longest sequence (or pair)."""
    least = spec.workload.longest * spec.workload.together
    tokens = spec.workload.budget
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


def _of_trained(spec: RunSpec[Any], move: TrainedMove) -> Move:
    """The move made by all roles that learn."""
    return {
        f"{name}.{key}": value
        for name, role in spec.trained.items()
        for key, value in move(role).items()
    }


def _of_frozen(spec: RunSpec[Any], move: FrozenMove) -> Move:
    """The move made by all models that only score."""
    found: dict[str, Value] = {}
    for name, role in spec.frozen.items():
        key = spec.roles[name].key
        made = {f"{key}.{option}": value for option, value in move(role).items()}
        if changes_between(spec, made) and name == "reference":
            made |= written_reference(spec)
        found |= made
    return found


def _engine_moves(spec: RunSpec[Any], plan: Plan, hardware: Hardware) -> Iterator[Move]:
    assert spec.sampling is not None
    rollout = spec.sampling.rollout
    if rollout.engine == "vllm" and hardware.nodes[0].cards:
        yield from _shares(rollout, plan)
    elif rollout.engine == "vllm":
        yield from _caches(rollout, plan)
    other = "own" if rollout.placement == "shared" else "shared"
    moved: Move = {"rollout.placement": other}
    if other == "own":
        moved = {**moved, "rollout.sleep_level": 0}
    yield with_room(spec, moved, hardware)


def _shares(rollout: RolloutConfig, plan: Plan) -> Iterator[Move]:
    """The shares of a card that the ranks leave, awake and asleep; a larger one where the engine's
    weights or KV cache lack room."""
    if any(problem.code == "vllm-share" for problem in plan.problems):
        yield {"rollout.memory_share": LARGEST_SHARE}
    if rollout.placement != "shared":
        return
    beside = [store.without(_is_engine) for store in plan.devices if _has_both(store)]
    for level in (0, 1, 2):
        shares = (largest_share(store, plan.band, asleep=level > 0) for store in beside)
        share = min((*shares, LARGEST_SHARE))
        if share > 0:
            yield {"rollout.sleep_level": level, "rollout.memory_share": share}


def _caches(rollout: RolloutConfig, plan: Plan) -> Iterator[Move]:
    """The KV cache for which everything else on the hosts leaves room, in halves of a GiB."""
    rooms = [
        store.capacity - likely_worst(store.without(_is_cache).peak, plan.band)
        for store in plan.hosts
        if store.capacity is not None and any(_is_cache(one.item) for one in store.held)
    ]
    halves = min(rooms, default=0) // (rollout.engines * 2**29)
    if 0 < halves / 2 < rollout.cpu_kv_cache_gib:
        yield {"rollout.cpu_kv_cache_gib": halves / 2}


def _is_cache(item: Item) -> bool:
    return item.cache


def _has_both(store: Store) -> bool:
    return {True, False} == {one.item.role == "rollout" for one in store.held}


def _is_engine(item: Item) -> bool:
    return item.role == "rollout"


def _cluster_moves(spec: RunSpec[Any], hardware: Hardware) -> Iterator[Move]:
    """Ranks on cards that are free; more on another node; as many as there are cards; nodes for
    all; the critic on ranks of its own."""
    cluster, cards = spec.cluster, len(hardware.nodes[0].cards)
    yield filled(spec, hardware)
    yield grown(spec, hardware, 1)
    if not cards:
        return
    yield {"cluster.ranks": min(cluster.ranks, cluster.nodes * cards)}
    yield with_room(spec, {}, hardware)
    if "critic" in spec.trained and cluster.critic_ranks is None:
        yield with_room(spec, {"cluster.critic_ranks": cluster.ranks}, hardware)


def with_room(spec: RunSpec[Any], move: Move, hardware: Hardware) -> Move:
    """The move with as many nodes as its processes need; none where even many would not do."""
    made = changed(spec, changes_between(spec, move))
    cards = len(hardware.nodes[0].cards)
    if made is None or not cards:
        return move if made else {}
    nodes = made.cluster.nodes
    needed = -(-lay_out(made, [cards] * nodes).cards_needed // cards)
    for count in range(nodes, max(nodes, needed) + 2):
        if not lay_out(made, [cards] * count).homeless:
            return move if count == nodes else {**move, "cluster.nodes": count}
    return {}
