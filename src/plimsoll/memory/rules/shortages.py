"""The problems of a plan: what does not fit, by how much, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from plimsoll.config.codes import PlanCode
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.contents.stores import Band, Store, judge
from plimsoll.memory.rules.culprit import Culprit, find_culprit
from plimsoll.memory.rules.engines import beside_training
from plimsoll.memory.rules.problems import PlanProblem
from plimsoll.rollout.vllm_price import GIB, card_share, least_share
from plimsoll.run.counting import counted, gigabytes
from plimsoll.timeline.items import Item

_TOO_SMALL: Mapping[str, PlanCode] = {"device": "device-memory", "host": "host-memory"}
_BLOCK = 256
"""Tokens of the largest blocks that vLLM counts a KV cache in (vllm/platforms/cpu.py)."""


def find_shortages(
    job: Job, stores: Sequence[Store], disk: Sequence[Item], free_disk: int | None, band: Band
) -> Iterator[PlanProblem]:
    """All of them, errors and warnings. free_disk: bytes; None where unknown."""
    yield from _cards(job)
    yield from _engines(job)
    yield from _cpu_cache(job)
    for store in stores:
        verdict = judge(store, band)
        if verdict == "does not fit":
            culprit = find_culprit(store, job.spec)
            engines = culprit.kind == "rollout engines"
            shared = beside_training(job, store, band) if engines else None
            yield shared or _overfull(store, culprit)
        elif verdict == "risky":
            yield _close(store, band)
    if free_disk is not None:
        yield from _disk(disk, free_disk)


def _cards(job: Job) -> Iterator[PlanProblem]:
    have = sum(len(node.cards) for node in job.hardware.nodes)
    layout, sampled = job.layout, job.sampler is not None
    if job.spec.cluster.device == "cuda" and have == 0:
        yield PlanProblem(
            "no-gpu",
            "error",
            "cluster.device is cuda, and the hardware has no GPU",
            "nothing can be put on a card that is not there",
            "cluster.device: cpu, or cluster.hardware: the cards that the run will have",
        )
    if layout.homeless:
        yield PlanProblem(
            "more-ranks-than-gpus",
            "error",
            f"the run needs {counted(layout.cards_needed, 'GPU')} and the hardware has {have}: no "
            f"card is left for {_listed(layout.homeless)}",
            "every rank has a card of its own"
            + ", and so has every part of an engine unless rollout.placement is shared; the parts "
            "of an engine are on one node" * sampled,
            "fewer cluster.ranks"
            + " or rollout.engines, rollout.placement: shared" * sampled
            + ", or more cluster.nodes",
        )


def _engines(job: Job) -> Iterator[PlanProblem]:
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
    yield PlanProblem(
        "vllm-share",
        "error",
        f"vLLM's share of a card, {sampler.rollout.memory_share:g} of {gigabytes(card_bytes)} GB, "
        f"leaves {gigabytes(max(0, share.kv_cache))} GB for the KV cache",
        f"its weights, profiled peak and CUDA graphs take {gigabytes(fixed)} GB, and the KV cache "
        f"of one sequence of {sampler.longest:,} tokens {gigabytes(needed)} GB; vLLM would not "
        "start",
        f"rollout.memory_share: {least:.2f} or more"
        if least * card_bytes + beside <= card_bytes
        else f"a larger rollout.tensor_parallel (now {sampler.rollout.tensor_parallel})",
    )


def _cpu_cache(job: Job) -> Iterator[PlanProblem]:
    """A vLLM on CPU whose cache, which is asked for in GiB, does not hold one sequence."""
    sampler = job.sampler
    if sampler is None or job.device != "cpu" or sampler.rollout.engine != "vllm":
        return
    asked, needed = sampler.rollout.cpu_kv_cache_gib, sampler.kv_token * sampler.longest
    if asked * GIB >= needed:
        return
    least = ceil(100 * sampler.kv_token * (sampler.longest + _BLOCK) / GIB) / 100
    yield PlanProblem(
        "vllm-cache",
        "error",
        f"rollout.cpu_kv_cache_gib is {asked:g}, and the KV cache of one sequence takes "
        f"{needed / GIB:.2g} GiB",
        f"a sequence may be {sampler.longest:,} tokens long; vLLM would not start",
        f"rollout.cpu_kv_cache_gib: {least:.2f} or more, or shorter sequences",
    )


def _disk(disk: Sequence[Item], free: int) -> Iterator[PlanProblem]:
    needed = sum(item.bytes for item in disk)
    if needed > free:
        yield PlanProblem(
            "disk-space",
            "error",
            f"checkpoints and model take {gigabytes(needed)} GB of disk, and {gigabytes(free)} GB "
            "are free",
            "; ".join(f"{item.role} {item.name}: {item.formula}" for item in disk),
            "fewer run.keep_checkpoints, or a run.directory on a larger disk",
        )


def _overfull(store: Store, culprit: Culprit) -> PlanProblem:
    assert store.capacity is not None
    peak = store.peak
    over = gigabytes(peak.bytes - store.capacity)
    share = gigabytes(culprit.bytes)
    alone = "without them the rest fits" if culprit.alone else "the largest, and not alone in it"
    items = ", ".join(f"{item.name} {gigabytes(item.bytes)}" for item in culprit.items[:4])
    return PlanProblem(
        _TOO_SMALL[store.where],
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment.phase} "
        f"({peak.moment.instant}), {over} GB more than it has",
        f"it breaks on {culprit.what}, {share} GB ({items}): {alone}",
        culprit.fix,
    )


def _close(store: Store, band: Band) -> PlanProblem:
    assert store.capacity is not None
    peak = store.peak
    largest = ", ".join(f"{i.role} {i.name} {gigabytes(i.bytes)}" for i in peak.items[:3])
    return PlanProblem(
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
