"""The memory levers of vLLM's engines: how much of a card they take, and when.

A move that changes how much memory an engine needs, or when, also sets a share of the card that
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import floor
from typing import Any

from plimsoll.config.problems import CROWDED, UNPLACED, UNSTARTED
from plimsoll.config.rollout import RolloutConfig
from plimsoll.resolve.run_spec import Phase
from plimsoll.sampler.levers import ENGINES
from plimsoll.sampler.price import sampler_of
from plimsoll.sampler.vllm.config import VllmConfig, vllm_of
from plimsoll.sampler.vllm.holdings import ASLEEP, least_cpu_cache, least_share
from plimsoll.sampler.vllm.plan_rules import against_parallel
from plimsoll.sampler.vllm.sampler import keeps_weights, narrow_weights, vllm_sampler
from plimsoll.timeline.levers import Lever, Move, Relief, Situation

_SHARE = "rollout.vllm.memory_share"
_SLEEP = "rollout.vllm.sleep_level"
_PARALLEL = "rollout.vllm.tensor_parallel"
_CACHE = "rollout.vllm.cpu_kv_cache_gib"
_QUANTIZATION = "rollout.vllm.arguments.quantization"

_LARGEST_SHARE = 0.9
"""The largest share of a card for vLLM: its own default."""
_PARALLELS = (1, 2, 4, 8)


def _with_share(at: Situation, move: Move) -> Move:
    """Return the move, with a new share of a card if the present share does not fit the move.

    With the new share the engines start, and the ranks on these cards have their room.
    """
    if at.device == "cpu":
        return move
    rollout = _after(at.rollout, move)
    sampler = sampler_of(at.spec, at.policy)
    assert sampler is not None
    share = vllm_of(rollout).memory_share
    card = min(card.usable_bytes for card in at.hardware.node.cards)
    least = least_share(vllm_sampler(replace(sampler, rollout=rollout)), card)
    most = _largest_share(at, rollout)
    if least <= share <= most:
        return move
    return {**move, _SHARE: min(_LARGEST_SHARE, max(least, most))}


def _after(rollout: RolloutConfig, move: Move) -> RolloutConfig:
    """Return the settings of the engines after a move."""
    vllm, section = vllm_of(rollout), "rollout.vllm."
    changes: dict[str, Any] = {
        key.removeprefix(section): value for key, value in move.items() if key.startswith(section)
    }
    if _QUANTIZATION in move:
        quantization = changes.pop("arguments.quantization")
        changes["arguments"] = {**vllm.arguments, "quantization": quantization}
    return rollout.with_engine(vllm.model_copy(update=changes))


def _largest_share(at: Situation, rollout: RolloutConfig) -> float:
    """Return the largest share of a card that everything else leaves to an engine.

    The share is in hundredths, rounded down. Memory that others hold only while the engine sleeps
    does not count.
    """
    if rollout.placement == "own":
        return max(_LARGEST_SHARE, vllm_of(rollout).memory_share)
    asleep: tuple[Phase, ...] = ASLEEP if vllm_of(rollout).sleeps else ()
    if asleep and at.spec.rank_sleep != "none":
        asleep = (*asleep, "load", "save")  # for ranks, or with what they have in `rollout`
    shares = [1.0]
    for room in at.rooms:
        if room.where == "device":
            held = max((size for p, size in room.others.items() if p not in asleep), default=0)
            shares.append(max(0, floor(100 * (room.capacity - held) / room.capacity)) / 100)
    return min(shares)


def sleep_level(vllm: VllmConfig) -> int:
    """Return the sleep level, 1 or 2, that suits engines that sleep.

    Level 2 drops weights, and a sync brings all of them anyway: at level 1 they would cross to the
    host and back in each step, only to be overwritten. Level 1 is for weights that no sync brings.
    """
    return 1 if keeps_weights(vllm) else 2


def _asleep(at: Situation) -> Sequence[Move]:
    rollout = at.rollout
    vllm = vllm_of(rollout)
    level = sleep_level(vllm)
    if rollout.placement == "own" or vllm.sleep_level >= level:
        return ()
    return [_with_share(at, {_SLEEP: level})]


def _divided_engines(at: Situation) -> Sequence[Move]:
    """Return moves to more cards per engine, with fewer engines if there are too few cards.

    If one engine has more cards than there are, moves to fewer cards per engine are included.
    """
    rollout, cluster = at.rollout, at.spec.cluster
    vllm = vllm_of(rollout)
    shared = rollout.placement == "shared"
    room = cluster.all_ranks if shared else at.cards - cluster.all_ranks
    in_all = min(rollout.all_parts, room)
    most = min(len(at.hardware.node.cards), room)
    moves: list[Move] = []
    for parallel in _PARALLELS:
        parts = parallel * vllm.pipeline_parallel
        further = parallel > vllm.tensor_parallel or rollout.parts > most
        if further and parts <= most and not list(against_parallel(at.policy, parallel)):
            moves.append({_PARALLEL: parallel, ENGINES: max(1, in_all // parts)})
    return [_with_share(at, move) for move in moves]


def _narrow_engines(at: Situation) -> Sequence[Move]:
    """Return the move to 8-bit weights for engines on cards; none if it is impossible or done."""
    rollout = at.rollout
    given = "quantization" in vllm_of(rollout).arguments
    if at.device == "cpu" or given or rollout.dtype == "float32":
        return ()
    return [_with_share(at, {_QUANTIZATION: narrow_weights(at.capability)})]


def _caches_on_cpu(at: Situation) -> Sequence[Move]:
    """Return moves to smaller KV caches: what the hosts have room for, and the least.

    The first is in halves of a GiB; with the second vLLM just starts.
    """
    sampler, rollout = sampler_of(at.spec, at.policy), at.rollout
    if sampler is None or at.device != "cpu":
        return ()
    size = vllm_of(rollout).cpu_kv_cache_gib
    rooms = [r.capacity - max(r.others.values(), default=0) for r in at.rooms if r.where == "host"]
    halves = min(rooms, default=0) // (rollout.engines * 2**29)
    least = least_cpu_cache(vllm_sampler(sampler))
    larger = [halves / 2] if least < halves / 2 < size else []
    return [{_CACHE: each} for each in (*larger, least)]


_TOO_LITTLE = UNSTARTED | CROWDED

_vllm_lever = partial(Lever, engine=VllmConfig)

LEVERS: tuple[Lever, ...] = (
    _vllm_lever(
        keys=(_SHARE,),
        words="another share of a card for vLLM",
        cost="the KV cache has what the share leaves: fewer or more sequences at once",
        rank=5,
        settings=lambda at: [_with_share(at, {})],
        reliefs=(Relief(("rollout engines",), where=("device",)),),
        codes=_TOO_LITTLE,
        control=True,
    ),
    _vllm_lever(
        keys=(_SLEEP,),
        words="engines that sleep while the ranks train",
        cost="a sleeping engine wakes for each rollout",
        rank=20,
        settings=_asleep,
        reliefs=(
            Relief(("rollout engines",), where=("device",), phases=ASLEEP),
            Relief(("rollout engines",), where=("host",)),
        ),
        codes=CROWDED,
        control=True,
    ),
    _vllm_lever(
        keys=(_PARALLEL, ENGINES),
        words="engines divided over several cards",
        cost="the parts of an engine exchange activations in every layer",
        rank=20,
        settings=_divided_engines,
        reliefs=(Relief(("rollout engines",)),),
        codes=(_TOO_LITTLE | UNPLACED).union(("tensor-parallel-node",)),
        control=True,
    ),
    _vllm_lever(
        keys=(_CACHE,),
        words="another size of the KV cache in host memory",
        cost="with a smaller cache fewer sequences are sampled at once",
        rank=5,
        settings=_caches_on_cpu,
        reliefs=(Relief(("rollout engines",), where=("host",)),),
        codes=UNSTARTED,
    ),
    _vllm_lever(
        keys=(_QUANTIZATION,),
        words="engines with weights of 8 bits",
        cost="engines sample from rounded weights: algorithm.correction weighs the difference",
        rank=55,
        effect="rounding",
        settings=_narrow_engines,
        reliefs=(Relief(("rollout engines",), where=("device",)),),
        codes=_TOO_LITTLE,
    ),
)
