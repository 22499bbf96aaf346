"""Remedies for engines that do not start, or leave their cards or those beside them no room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import floor

from plimsoll.config.rollout import RolloutConfig
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.contents.stores import Band, Store
from plimsoll.memory.remedies.changes import Move, Remedy
from plimsoll.memory.remedies.levers import narrow_engines, sleep
from plimsoll.memory.remedies.top_consumer import find_top_consumer
from plimsoll.rollout.price import Sampler
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.holdings import ASLEEP, least_cpu_cache, least_share
from plimsoll.rollout.vllm.sampler import vllm_sampler


def smaller_shares(job: Job, ranks: Store, band: Band) -> Iterator[Remedy]:
    """For engines whose share and the ranks are too much together: the shares that leave the ranks
    their room, as far as vLLM starts with them; cards of its own.

    ranks: a card with what the ranks hold there, alone.
    """
    assert job.sampler is not None and ranks.capacity is not None
    rollout, least = job.sampler.rollout, least_share(vllm_sampler(job.sampler), ranks.capacity)
    level = vllm_of(rollout).sleep_level
    awake, asleep = largest_share(ranks, band), largest_share(ranks, band, asleep=True)
    if awake >= least and level == 0:
        yield Remedy({"rollout.vllm.memory_share": awake})
    if asleep >= least:
        yield Remedy(
            {**(sleep(rollout) if level == 0 else {}), "rollout.vllm.memory_share": asleep}
        )
    if asleep < least:
        yield from _larger_parts(job, rollout)
        yield from find_top_consumer(_beside_engine(ranks, rollout), job.spec).remedies
        yield from _narrow(job, rollout)
    awake_there = {"rollout.vllm.sleep_level": 0} if level else {}
    yield Remedy({"rollout.placement": "own", **awake_there, **_nodes_for(job, rollout)})


def _narrow(job: Job, rollout: RolloutConfig) -> Iterator[Remedy]:
    if made := narrow_engines(rollout, job.capability):
        yield Remedy(made)


def _larger_parts(job: Job, rollout: RolloutConfig) -> Iterator[Remedy]:
    """Yield engines over twice as many cards of a node and so on, and fewer of them."""
    parallel, cards = vllm_of(rollout).tensor_parallel, rollout.engines * rollout.parts
    while 2 * parallel * vllm_of(rollout).pipeline_parallel <= job.hardware.cards_of_node:
        parallel *= 2
        fewer = max(1, cards // (parallel * vllm_of(rollout).pipeline_parallel))
        engines: Move = {"rollout.engines": fewer} if fewer != rollout.engines else {}
        yield Remedy({"rollout.vllm.tensor_parallel": parallel, **engines})


def _beside_engine(ranks: Store, rollout: RolloutConfig) -> Store:
    """What an engine leaves of a card, and what the ranks hold there while it is awake."""
    assert ranks.capacity is not None
    asleep = ASLEEP if vllm_of(rollout).sleep_level else ()
    awake = (
        replace(one, moments=frozenset(m for m in one.moments if m.phase not in asleep))
        for one in ranks.held
    )
    left = ranks.capacity - int(vllm_of(rollout).memory_share * ranks.capacity)
    return replace(ranks, capacity=left, held=tuple(awake))


def _nodes_for(job: Job, rollout: RolloutConfig) -> Move:
    """Return the nodes with cards for engines of their own, where these have too few."""
    needed = job.spec.cluster.all_ranks + rollout.engines * rollout.parts
    nodes = -(-needed // job.hardware.cards_of_node)
    return {"cluster.nodes": nodes} if nodes > job.spec.cluster.nodes else {}


def largest_share(ranks: Store, band: Band, *, asleep: bool = False) -> float:
    """The share of a card, in hundredths rounded down, that ranks leave to an engine that is awake
    always, or that is asleep while they work. Their bytes are taken with the band's share.

    ranks: the card with what the ranks hold there, alone.
    """
    assert ranks.capacity is not None
    uses = [use for use in ranks.uses if not asleep or use.moment.phase not in ASLEEP]
    held = max((use.bytes for use in uses), default=0) * (1 + band.share)
    return max(0, floor(100 * (ranks.capacity - held) / ranks.capacity)) / 100


def starting_shares(job: Job, least: float, *, room: bool) -> Iterator[Remedy]:
    """What vLLM would start with. least: share of a card; room: whether a card has it. On cards
    that ranks share too, smaller parts of an engine leave them more. Its parts are of one node."""
    assert job.sampler is not None
    rollout = job.sampler.rollout
    if room:
        yield Remedy({"rollout.vllm.memory_share": least}, "or more")
    if job.device == "cuda":
        yield from _narrow(job, rollout)
    if rollout.placement == "shared" or not room:
        yield from _larger_parts(job, rollout)
    if not room and rollout.parts == job.hardware.cards_of_node:
        yield Remedy(words="a smaller model, or nodes with larger cards or more of them")


def starting_caches(sampler: Sampler) -> Iterator[Remedy]:
    """The KV cache on CPU with which vLLM would start."""
    yield Remedy(least_cache(sampler), "or more")
    yield Remedy(words="shorter sequences")


def least_cache(sampler: Sampler) -> Move:
    return {"rollout.vllm.cpu_kv_cache_gib": least_cpu_cache(vllm_sampler(sampler))}


def fewer_processes(job: Job) -> list[Remedy]:
    """For a run with more of them than cards: what there can be less or more of, and engines
    without cards of their own."""
    have, ranks = job.hardware.cards, job.spec.cluster.all_ranks
    rollout = job.sampler.rollout if job.sampler else None
    shared = rollout is not None and rollout.placement == "shared"
    less = ["cluster.ranks"] if ranks > (have if shared else 1) else []
    if rollout is not None:
        less += _engines_beyond(rollout, min(ranks, have) if shared else 0)
    remedies = [Remedy(words=f"fewer {' or '.join(less)}")] if less else []
    remedies += [Remedy({"rollout.placement": "shared"})] if rollout and not shared else []
    more = "more cluster.nodes" if job.layout.cards_needed > have else "more cluster.ranks"
    return [*remedies, Remedy(words=more)]


def _engines_beyond(rollout: RolloutConfig, cards: int) -> Iterator[str]:
    """What engines have too many of for so many cards; 0: for cards of their own."""
    if rollout.engines > 1 and rollout.engines * rollout.parts > cards:
        yield "rollout.engines"
    if rollout.parts > cards > 0:
        staged = " x rollout.vllm.pipeline_parallel" * (vllm_of(rollout).pipeline_parallel > 1)
        yield f"parts of an engine (rollout.vllm.tensor_parallel{staged})"
