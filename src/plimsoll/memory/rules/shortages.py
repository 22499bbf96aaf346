"""The problems of a plan: what does not fit, by how much, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plimsoll.config.codes import Code
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import RolloutConfig
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.contents.stores import Band, Store, verdict_of
from plimsoll.memory.rules.engines import beside_training
from plimsoll.memory.rules.top_consumer import TopConsumer, find_top_consumer
from plimsoll.rollout.vllm_price import GIB, card_share, least_cpu_cache, least_share
from plimsoll.run.counting import counted, gigabytes
from plimsoll.timeline.items import Item

_TOO_SMALL: Mapping[str, Code] = {"device": "device-memory", "host": "host-memory"}


def find_missing(job: Job, disk: Sequence[Item], free_disk: int | None) -> Iterator[Problem]:
    """Errors but those of cards and hosts that hold too much. free_disk: bytes; None where
    unknown."""
    yield from _cards(job)
    yield from _engines(job)
    yield from _cpu_cache(job)
    if free_disk is not None:
        yield from _disk(job, disk, free_disk)


def find_overfull(job: Job, stores: Sequence[Store], band: Band) -> Iterator[Problem]:
    """An error of each card and host that does not hold its peak, a warning where it may not."""
    for store in stores:
        verdict = verdict_of(store, band)
        if verdict == "does not fit":
            top_consumer = find_top_consumer(store, job.spec)
            engines = top_consumer.kind == "rollout engines"
            shared = beside_training(job, store, band) if engines else None
            yield shared or _overfull(store, top_consumer)
        elif verdict == "risky":
            yield _close(store, band)


def _cards(job: Job) -> Iterator[Problem]:
    have = sum(len(node.cards) for node in job.hardware.nodes)
    layout, sampled = job.layout, job.sampler is not None
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
            _fewer(job, have),
        )


def _fewer(job: Job, have: int) -> str:
    """What there can be less or more of, and engines without cards of their own. have: cards."""
    cluster, rollout = job.spec.cluster, job.sampler.rollout if job.sampler else None
    ranks = cluster.ranks + (cluster.critic_ranks or 0)
    shared = rollout is not None and rollout.placement == "shared"
    less = ["cluster.ranks"] if ranks > (have if shared else 1) else []
    if rollout is not None:
        less += _engines_beyond(rollout, min(ranks, have) if shared else 0)
    ways = [f"fewer {' or '.join(less)}"] if less else []
    ways += ["rollout.placement: shared"] if rollout is not None and not shared else []
    ways += ["more cluster.nodes" if job.layout.cards_needed > have else "more cluster.ranks"]
    return ", ".join(ways[:-1]) + ", or " * (len(ways) > 1) + ways[-1]


def _engines_beyond(rollout: RolloutConfig, cards: int) -> Iterator[str]:
    """What engines have too many of for so many cards; 0: for cards of their own."""
    if rollout.engines > 1 and rollout.engines * rollout.tensor_parallel > cards:
        yield "rollout.engines"
    if rollout.tensor_parallel > cards > 0:
        yield "parts of an engine (rollout.tensor_parallel)"


def _engines(job: Job) -> Iterator[Problem]:
    """A vLLM that would not start, or not hold one sequence."""
    sampler = job.sampler
    slots = [p.slot for p in job.layout.processes if p.kind == "engine worker"]
    if sampler is None or job.device == "cpu" or not slots:
        return
    card_bytes = min(job.hardware.nodes[s.node].cards[s.card or 0].usable_bytes for s in slots)
    share = card_share(sampler, card_bytes)
    needed = sampler.kv_token * sampler.longest
    if share.kv_cache >= needed:
        return
    fixed, least = share.asked - share.kv_cache, least_share(sampler, card_bytes)
    beside = job.constants.cuda_context
    yield Problem(
        "vllm-share",
        "error",
        f"vLLM's share of a card, {sampler.rollout.memory_share:g} of {gigabytes(card_bytes)} GB, "
        f"leaves {gigabytes(max(0, share.kv_cache))} GB for the KV cache",
        f"its weights, profiled peak and CUDA graphs take {gigabytes(fixed)} GB, and the KV cache "
        f"of one sequence of {sampler.longest:,} tokens {gigabytes(needed)} GB; vLLM would not "
        "start",
        ", or ".join(_starting(job, least, room=least * card_bytes + beside <= card_bytes)),
    )


def _starting(job: Job, least: float, *, room: bool) -> Iterator[str]:
    """What vLLM would start with. least: share of a card; room: whether a card has it. On cards
    that ranks share too, smaller parts of an engine leave them more. Its parts are of one node."""
    assert job.sampler is not None
    rollout, cards = job.sampler.rollout, max(len(node.cards) for node in job.hardware.nodes)
    if room:
        yield f"rollout.memory_share: {least:.2f} or more"
    if rollout.tensor_parallel < cards and (rollout.placement == "shared" or not room):
        yield f"a larger rollout.tensor_parallel (now {rollout.tensor_parallel})"
    elif not room:
        yield "a smaller model, or nodes with larger cards or more of them"


def _cpu_cache(job: Job) -> Iterator[Problem]:
    """A vLLM on CPU whose cache, which is asked for in GiB, does not hold one sequence."""
    sampler = job.sampler
    if sampler is None or job.device != "cpu" or sampler.rollout.engine != "vllm":
        return
    asked, needed = sampler.rollout.cpu_kv_cache_gib, sampler.kv_token * sampler.longest
    if asked * GIB >= needed:
        return
    yield Problem(
        "vllm-cache",
        "error",
        f"rollout.cpu_kv_cache_gib is {asked:g}, and the KV cache of one sequence takes "
        f"{needed / GIB:.2g} GiB",
        f"a sequence may be {sampler.longest:,} tokens long; vLLM would not start",
        f"rollout.cpu_kv_cache_gib: {least_cpu_cache(sampler):.2f} or more, or shorter sequences",
    )


def _disk(job: Job, disk: Sequence[Item], free: int) -> Iterator[Problem]:
    needed = sum(item.bytes for item in disk)
    if needed > free:
        yield Problem(
            "disk-space",
            "error",
            f"checkpoints and model take {gigabytes(needed)} GB of disk, and {gigabytes(free)} GB "
            "are free",
            "; ".join(f"{item.role} {item.name}: {item.formula}" for item in disk),
            "fewer run.keep_checkpoints, or " * (job.spec.run.keep_checkpoints > 1)
            + "a run.directory on a larger disk",
        )


def _overfull(store: Store, top_consumer: TopConsumer) -> Problem:
    assert store.capacity is not None
    peak = store.peak
    over = gigabytes(peak.bytes - store.capacity)
    share = gigabytes(top_consumer.bytes)
    alone = (
        "without them the rest fits" if top_consumer.alone else "the largest, and not alone in it"
    )
    items = ", ".join(f"{item.name} {gigabytes(item.bytes)}" for item in top_consumer.items[:4])
    return Problem(
        _TOO_SMALL[store.where],
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment.phase} "
        f"({peak.moment.instant}), {over} GB more than it has",
        f"it breaks on {top_consumer.what}, {share} GB ({items}): {alone}",
        top_consumer.fix,
    )


def _close(store: Store, band: Band) -> Problem:
    assert store.capacity is not None
    peak = store.peak
    largest = ", ".join(f"{i.role} {i.name} {gigabytes(i.bytes)}" for i in peak.items[:3])
    return Problem(
        _TOO_SMALL[store.where],
        "warning",
        f"{store.name} would hold {gigabytes(peak.bytes)} of {gigabytes(store.capacity)} GB in "
        f"{peak.moment.phase} ({peak.moment.instant}): closer than the plan is exact",
        f"predictions may be {band.share:.0%} too low; the largest items are {largest}",
        "try it with a short run, or make room as for what does not fit",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
