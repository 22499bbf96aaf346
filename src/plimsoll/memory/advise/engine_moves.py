"""What may be changed about the engines so that they, and what is beside them, have room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from plimsoll.config.rollout import RolloutConfig
from plimsoll.memory.advise.states import with_room
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.stores import Store, likely_worst, verdict_of
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.remedies import levers
from plimsoll.memory.remedies.changes import Move, changed, changes_between
from plimsoll.memory.remedies.engines import largest_share, least_cache
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.holdings import least_share
from plimsoll.rollout.vllm.plan_rules import against_parallel
from plimsoll.rollout.vllm.sampler import keeps_weights, vllm_sampler

LARGEST_SHARE = 0.9
"""Of a card, for vLLM: its own default."""
_PARALLEL = (1, 2, 4, 8)
_BUCKET = 64 * 2**20
"""Bytes of weights at once: less saves little more."""


def engine_forms(plan: Plan) -> Iterator[Move]:
    """Where engines are, over how many cards each, and what they take of a card."""
    spec = plan.job.spec
    rollout = spec.engines
    if rollout is None or spec.cluster.where == "local":
        return
    if rollout.engine_name == "vllm" and plan.job.device == "cuda":
        yield from _shared(rollout, plan)
        yield from _own(rollout, plan)
    else:
        other = "own" if rollout.placement == "shared" else "shared"
        yield with_room(spec, {"rollout.placement": other}, plan.job.hardware)


def narrow_engines(plan: Plan) -> Iterator[Move]:
    """Yield weights of 8 bits for vLLM on cards: alone, and with the share of a card that such an
    engine needs where it is."""
    spec = plan.job.spec
    move = (
        levers.narrow_engines(spec.engines, plan.job.capability) if _is_vllm(spec.engines) else {}
    )
    narrow = changed(spec, changes_between(spec, move))
    if not move or narrow is None or plan.job.device == "cpu":
        return
    yield move
    job = make_job(narrow, plan.job.hardware, plan.job.constants)
    where = ("rollout.placement", "rollout.vllm.tensor_parallel")
    for form in engine_forms(replace(plan, job=job)):
        if not changes_between(spec, {key: form[key] for key in where}):
            yield {**form, **move}


def _is_vllm(rollout: RolloutConfig | None) -> TypeGuard[RolloutConfig]:
    return rollout is not None and rollout.engine_name == "vllm"


def smaller_engines(plan: Plan) -> Iterator[Move]:
    """Of engines that take no share of a card, and of those on a host that is too small."""
    spec = plan.job.spec
    rollout = spec.engines
    if rollout is None:
        return
    if rollout.engine_name == "transformers":
        yield from _fewer_sequences(rollout)
    elif plan.job.device == "cpu":
        yield from _other_cache(rollout, plan)
    if any(verdict_of(host, plan.band) != "fits" for host in plan.hosts):
        vllm = vllm_of(rollout) if _is_vllm(rollout) else None
        if vllm is not None and vllm.sleep_level == 1 and not keeps_weights(vllm):
            yield levers.sleep(rollout)
        yield {"rollout.engines": max(1, rollout.engines // 2)}
        yield {"rollout.sync.bucket_bytes": min(_BUCKET, rollout.sync.bucket_bytes)}


def _fewer_sequences(rollout: RolloutConfig) -> Iterator[Move]:
    """Half as many at once, and so on."""
    sequences = rollout.max_sequences
    while sequences > 1:
        sequences //= 2
        yield {"rollout.transformers.max_sequences": sequences}


def _shared(rollout: RolloutConfig, plan: Plan) -> Iterator[Move]:
    """On the ranks' cards, with the largest share that leaves the ranks their room, awake and
    asleep; with the least that an engine starts with, where they leave less."""
    cluster, ranks = plan.job.spec.cluster, plan.job.spec.cluster.all_ranks
    beside = [store.without_engines for store in plan.devices if _has_ranks(store)]
    cards = len(plan.job.hardware.nodes[0].cards) * cluster.nodes
    covered = min(rollout.engines * rollout.parts, ranks, cards)
    for parallel in _parallels(plan):
        parts = parallel * vllm_of(rollout).pipeline_parallel
        engines = max(1, covered // parts)
        if engines * parts > ranks:
            continue
        least = _least(plan, parallel)
        homes: Move = {"cluster.ranks": cards} if cluster.ranks > cards else {}
        for level in (0, 1, 2):
            room = min(largest_share(one, plan.band, asleep=level > 0) for one in beside)
            yield {
                **homes,
                "rollout.placement": "shared",
                "rollout.engines": engines,
                "rollout.vllm.tensor_parallel": parallel,
                "rollout.vllm.sleep_level": level,
                "rollout.vllm.memory_share": min(LARGEST_SHARE, max(least, room)),
            }


def _own(rollout: RolloutConfig, plan: Plan) -> Iterator[Move]:
    """On cards of their own, with fewer ranks or more nodes where cards lack."""
    cluster = plan.job.spec.cluster
    cards = len(plan.job.hardware.nodes[0].cards) * cluster.nodes
    for parallel in _parallels(plan):
        parts = parallel * vllm_of(rollout).pipeline_parallel
        engines = max(1, rollout.engines * rollout.parts // parts)
        least = _least(plan, parallel)
        share = (
            vllm_of(rollout).memory_share
            if least <= vllm_of(rollout).memory_share
            else LARGEST_SHARE
        )
        move: Move = {
            "rollout.placement": "own",
            "rollout.engines": engines,
            "rollout.vllm.tensor_parallel": parallel,
            "rollout.vllm.sleep_level": 0,
            "rollout.vllm.memory_share": share,
        }
        left = cards - engines * parts
        if least <= share:
            if 0 < left < cluster.ranks and cluster.critic_ranks is None:
                yield {**move, "cluster.ranks": left}
            yield with_room(plan.job.spec, move, plan.job.hardware)


def _parallels(plan: Plan) -> list[int]:
    """Over how many cards of a node each stage of an engine may be divided."""
    sampler = plan.job.sampler
    assert sampler is not None
    most = len(plan.job.hardware.nodes[0].cards) // vllm_of(sampler.rollout).pipeline_parallel
    each = sorted({*_PARALLEL, vllm_of(sampler.rollout).tensor_parallel})
    return [n for n in each if n <= most and not list(against_parallel(sampler.shape, n))]


def _least(plan: Plan, parallel: int) -> float:
    """The share of a card with which vLLM starts."""
    sampler = plan.job.sampler
    assert sampler is not None
    vllm = vllm_of(sampler.rollout).model_copy(update={"tensor_parallel": parallel})
    rollout = sampler.rollout.with_engine(vllm)
    card = plan.job.hardware.nodes[0].cards[0]
    return least_share(vllm_sampler(replace(sampler, rollout=rollout)), card.usable_bytes)


def _other_cache(rollout: RolloutConfig, plan: Plan) -> Iterator[Move]:
    """The KV cache on CPU for which everything else on the hosts leaves room, in halves of a GiB,
    and the least that vLLM starts with."""
    sampler, asked = plan.job.sampler, vllm_of(rollout).cpu_kv_cache_gib
    assert sampler is not None
    rooms = [
        store.capacity - likely_worst(store.without(lambda item: item.cache).peak, plan.band)
        for store in plan.hosts
        if store.capacity is not None and any(one.item.cache for one in store.held)
    ]
    halves = min(rooms, default=0) // (rollout.engines * 2**29)
    if 0 < halves / 2 < asked:
        yield {"rollout.vllm.cpu_kv_cache_gib": halves / 2}
    yield least_cache(sampler)


def _has_ranks(store: Store) -> bool:
    return any(one.item.role in ("actor", "critic") for one in store.held)
