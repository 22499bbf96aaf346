"""The problems of a plan: what does not fit, by how much, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plimsoll.config.codes import Code
from plimsoll.config.problems import Problem
from plimsoll.config.run import RunConfig
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.contents.stores import Band, Store, verdict_of
from plimsoll.memory.remedies.engines import (
    fewer_processes,
    smaller_shares,
    starting_caches,
    starting_shares,
)
from plimsoll.memory.remedies.top_consumer import TopConsumer, find_top_consumer
from plimsoll.memory.rules.ways_out import Shortage
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.holdings import GIB, card_share, least_share, tightest_stage
from plimsoll.rollout.vllm.sampler import vllm_sampler
from plimsoll.run.counting import counted, gigabytes
from plimsoll.timeline.items import Item

_TOO_SMALL: Mapping[str, Code] = {"device": "device-memory", "host": "host-memory"}


def find_missing(job: Job, disk: Sequence[Item], free_disk: int | None) -> Iterator[Problem]:
    """Yield the errors of too few cards and of too little disk. free_disk: bytes; None where
    unknown."""
    yield from _cards(job)
    if free_disk is not None:
        yield from _disk(job, disk, free_disk)


def find_unstarted(job: Job) -> Iterator[Shortage]:
    """Yield the errors of engines that would not start."""
    yield from _engines(job)
    yield from _cpu_cache(job)


def find_overfull(job: Job, stores: Sequence[Store], band: Band) -> Iterator[Shortage]:
    """Yield an error of each card and host that does not hold its peak."""
    for store in stores:
        if verdict_of(store, band) == "does not fit":
            top = find_top_consumer(store, job.spec)
            engines = top.kind == "rollout engines"
            shared = _beside_training(job, store, band) if engines else None
            yield shared or _overfull(store, top)


def find_close(stores: Sequence[Store], band: Band) -> Iterator[Problem]:
    """Yield a warning of each card and host that may not hold its peak."""
    yield from (_close(store, band) for store in stores if verdict_of(store, band) == "risky")


def _cards(job: Job) -> Iterator[Problem]:
    have, layout, sampled = job.hardware.cards, job.layout, job.sampler is not None
    if job.spec.cluster.device == "cuda" and have == 0:
        yield Problem(
            "no-gpu",
            "error",
            "cluster.device is cuda, and the hardware has no GPU",
            "nothing can be put on a card that is not there",
            "cluster.device: cpu, or cluster.hardware: the cards that the run will have",
        )
    if layout.unplaced:
        yield Problem(
            "more-ranks-than-gpus",
            "error",
            f"the run needs {counted(layout.cards_needed, 'GPU')} and the hardware has {have}: no "
            f"card is left for {_listed(layout.unplaced)}",
            "every rank has a card of its own"
            + ", and so has every part of an engine unless rollout.placement is shared; the parts "
            "of an engine are on one node" * sampled,
            _listed_ways([remedy.text for remedy in fewer_processes(job)]),
        )


def _listed_ways(texts: Sequence[str]) -> str:
    *ways, last = texts
    return ", ".join(ways) + ", or " * bool(ways) + last


def _engines(job: Job) -> Iterator[Shortage]:
    """A vLLM that would not start, or not hold one sequence."""
    sampler = job.sampler
    cards = [job.card(p.slot) for p in job.layout.processes if p.kind == "engine worker"]
    if sampler is None or not any(cards) or sampler.rollout.engine_name != "vllm":
        return
    card_bytes = min(card.usable_bytes for card in cards if card is not None)
    own = vllm_sampler(sampler)
    tightest = tightest_stage(own, card_bytes)
    share, needed = card_share(tightest, card_bytes), tightest.kv_token * sampler.longest
    if share.kv_cache >= needed:
        return
    fixed, least = share.asked - share.kv_cache, least_share(own, card_bytes)
    beside = job.constants.cuda_context
    problem = Problem(
        "vllm-share",
        "error",
        f"vLLM's share of a card, {vllm_of(sampler.rollout).memory_share:g} of "
        f"{gigabytes(card_bytes)} GB, "
        f"leaves {gigabytes(max(0, share.kv_cache))} GB for the KV cache",
        f"its weights, profiled peak and CUDA graphs take {gigabytes(fixed)} GB, and the KV cache "
        f"of one sequence of {sampler.longest:,} tokens {gigabytes(needed)} GB; vLLM would not "
        "start",
    )
    room = least * card_bytes + beside <= card_bytes
    yield Shortage(problem, tuple(starting_shares(job, least, room=room)))


def _cpu_cache(job: Job) -> Iterator[Shortage]:
    """A vLLM on CPU whose cache, which is asked for in GiB, does not hold one sequence."""
    sampler = job.sampler
    if sampler is None or job.device != "cpu" or sampler.rollout.engine_name != "vllm":
        return
    token = max(stage.kv_token for stage in vllm_sampler(sampler).stages)
    asked, needed = vllm_of(sampler.rollout).cpu_kv_cache_gib, token * sampler.longest
    if asked * GIB >= needed:
        return
    problem = Problem(
        "vllm-cache",
        "error",
        f"rollout.vllm.cpu_kv_cache_gib is {asked:g}, and the KV cache of one sequence takes "
        f"{needed / GIB:.2g} GiB",
        f"a sequence may be {sampler.longest:,} tokens long; vLLM would not start",
    )
    yield Shortage(problem, tuple(starting_caches(sampler)))


def _disk(job: Job, disk: Sequence[Item], free: int) -> Iterator[Problem]:
    needed = sum(item.bytes for item in disk)
    if needed > free:
        yield Problem(
            "disk-space",
            "error",
            f"what the run saves takes {gigabytes(needed)} GB of disk, and {gigabytes(free)} GB "
            "are free",
            "; ".join(f"{item.role} {item.name}: {item.formula}" for item in disk),
            _listed_ways([*_saving_less(job.spec.run), "a run.directory on a larger disk"]),
        )


def _saving_less(run: RunConfig) -> Iterator[str]:
    """What has a run write less."""
    if run.keep_checkpoints > 1:
        yield "fewer run.keep_checkpoints"
    none = "run.keep_checkpoints: 0" + " without run.best" * (run.best is not None)
    keys = [none] * bool(run.keep_checkpoints) + ["run.save_model: false"] * run.save_model
    if keys:
        yield f"{' and '.join(keys)} (a trial that saves nothing)"


def _overfull(store: Store, top: TopConsumer) -> Shortage:
    assert store.capacity is not None
    peak = store.peak
    over = gigabytes(peak.bytes - store.capacity)
    share = gigabytes(top.bytes)
    alone = "without them the rest fits" if top.alone else "the largest, and not alone in it"
    items = ", ".join(f"{item.name} {gigabytes(item.bytes)}" for item in top.items[:4])
    problem = Problem(
        _TOO_SMALL[store.where],
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment}, {over} GB more than "
        "it has",
        f"it breaks on {top.what}, {share} GB ({items}): {alone}",
    )
    return Shortage(problem, top.remedies)


def _close(store: Store, band: Band) -> Problem:
    assert store.capacity is not None
    peak = store.peak
    largest = ", ".join(f"{i.role} {i.name} {gigabytes(i.bytes)}" for i in peak.items[:3])
    return Problem(
        _TOO_SMALL[store.where],
        "warning",
        f"{store.name} would hold {gigabytes(peak.bytes)} of {gigabytes(store.capacity)} GB in "
        f"{peak.moment}: closer than the plan is exact",
        f"predictions may be {band.share:.0%} too low; the largest items are {largest}",
        "try it with a short run, or make room as for what does not fit",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)


def _beside_training(job: Job, store: Store, band: Band) -> Shortage | None:
    """The error of an overfull card on which vLLM's share and the ranks are too much together;
    None where it is another.
    """
    sampler = job.sampler
    if sampler is None or store.where != "device" or store.capacity is None:
        return None
    rollout = sampler.rollout
    ranks = store.without_engines
    shares = rollout.engine_name == "vllm" and rollout.placement == "shared" and bool(ranks.held)
    if not shares or ranks.peak.bytes > store.capacity:
        return None
    peak = store.peak
    beside = sum(item.bytes for item in peak.items if item.role != "rollout")
    problem = Problem(
        "vllm-share-beside-training",
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment}, "
        f"{gigabytes(peak.bytes - store.capacity)} GB more than it has: "
        f"{gigabytes(beside)} GB of the ranks beside vLLM's "
        f"{gigabytes(peak.bytes - beside)} GB "
        f"(rollout.vllm.memory_share {vllm_of(rollout).memory_share:g})",
        "it breaks on the rollout engines: without them the rest fits. vLLM takes its share of the "
        "whole card, whatever the ranks hold there",
    )
    return Shortage(problem, tuple(smaller_shares(job, ranks, band)))
