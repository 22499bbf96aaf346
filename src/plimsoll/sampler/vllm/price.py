"""The price of an engine on vLLM for the plan, and the errors of engines with too little memory."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.cluster import Device
from plimsoll.config.problems import Problem
from plimsoll.run.numbers import gigabytes
from plimsoll.sampler.price import (
    CrowdedCard,
    EngineProcess,
    EngineSite,
    RolloutPrice,
    receiving_items,
)
from plimsoll.sampler.vllm.config import vllm_of
from plimsoll.sampler.vllm.holdings import (
    GIB,
    card_items,
    card_share,
    cpu_items,
    reload_items,
    routing_items,
    sleep_items,
    tightest_stage,
)
from plimsoll.sampler.vllm.plan_rules import free_share, plan_problems
from plimsoll.sampler.vllm.sampler import VllmSampler, vllm_sampler
from plimsoll.sync.price import CHECKSUM_BYTES, Sending
from plimsoll.timeline.items import Allocation, Moment


def _find_unstarted(site: EngineSite, card_bytes: int | None) -> Iterator[Problem]:
    """Yield the error of engines that would not start, or not hold one sequence.

    Args:
        site: the engines and their hardware.
        card_bytes: bytes of the smallest card of an engine; None on the CPU.
    """
    sampler = vllm_sampler(site.sampler)
    if card_bytes is None:
        token = max(stage.kv_token for stage in sampler.stages)
        requested, needed = sampler.vllm.cpu_kv_cache_gib, token * sampler.longest
        if requested * GIB < needed:
            yield Problem(
                "vllm-cache",
                "error",
                f"rollout.vllm.cpu_kv_cache_gib is {requested:g}, and the KV cache of one sequence "
                f"takes {needed / GIB:.2g} GiB",
                f"a sequence may be {sampler.longest:,} tokens long; vLLM would not start",
            )
        return
    tightest = tightest_stage(sampler, card_bytes)
    share, needed = card_share(tightest, card_bytes), tightest.kv_token * sampler.longest
    if share.kv_cache >= needed:
        return
    fixed = share.requested - share.kv_cache
    yield Problem(
        "vllm-share",
        "error",
        f"vLLM's share of a card, {sampler.vllm.memory_share:g} of {gigabytes(card_bytes)} GB, "
        f"leaves {gigabytes(max(0, share.kv_cache))} GB for the KV cache",
        f"its weights, profiled peak and CUDA graphs take {gigabytes(fixed)} GB, and the KV cache "
        f"of one sequence of {sampler.longest:,} tokens {gigabytes(needed)} GB; vLLM would not "
        "start",
    )


def _find_crowded(site: EngineSite, card: CrowdedCard) -> Iterator[Problem]:
    """Yield the error of a card on which vLLM's share and the ranks are too much together."""
    yield Problem(
        "vllm-share-beside-training",
        "error",
        f"{card.name} would hold {gigabytes(card.bytes)} GB in {card.moment}, "
        f"{gigabytes(card.bytes - card.capacity)} GB more than it has: "
        f"{gigabytes(card.beside)} GB of the ranks beside vLLM's "
        f"{gigabytes(card.bytes - card.beside)} GB "
        f"(rollout.vllm.memory_share {vllm_of(site.sampler.rollout).memory_share:g})",
        "it breaks on the rollout engines: without them the rest fits. vLLM takes its share of the "
        "whole card, whatever the ranks hold there",
    )


def _contents(process: EngineProcess) -> Iterator[Allocation]:
    """Yield the memory of one process of an engine: items, and the moments of each.

    The process is the engine's front, a worker on a card, or the full engine.
    """
    sampler, moments = vllm_sampler(process.sampler), process.moments
    whole, sending = process.device == "cpu" and sampler.vllm.parts == 1, process.sending
    if process.kind == "engine" and sending is not None and sending.route is None:
        # An engine's front keeps an adapter in shared memory.
        yield from receiving_items("file in shared memory", sending.bucket, moments)
    if process.kind != "engine worker" and not whole:
        return
    sampler = sampler.stages[sampler.vllm.stage_of(process.part)]
    if sending is not None:
        yield from _landing(sending, process.device, sampler, moments)
    yield from sleep_items(sampler, moments)
    card_bytes = 0 if process.card is None else process.card.usable_bytes
    yield from routing_items(sampler, process.device, card_bytes, moments)
    if process.device == "cpu":
        yield from cpu_items(sampler, moments)
    else:
        yield from card_items(sampler, card_bytes, process.context, moments)


def _landing(
    sending: Sending, device: Device, sampler: VllmSampler, moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield new weights as a worker has them: a mapping, a bucket on its card, held experts.

    A card has the room of the largest forward free meanwhile; by `ipc` a worker maps the memory of
    the rank.
    """
    if sending.route in (None, "host"):
        yield from receiving_items("received weights", sending.bucket, moments)
    if sending.route is None:
        return
    on_card, landed = device == "cuda", 0
    if on_card and sending.route != "ipc":
        landed = sending.bucket + CHECKSUM_BYTES
        size = max(0, landed - sampler.profile_peak)
        words = f"a bucket - {sampler.profile_peak:,} of the largest forward's room"
        yield from receiving_items("bucket on the card", size, moments, words, "device")
    free = max(0, sampler.profile_peak - landed) if on_card else 0
    yield from reload_items(sampler, "device" if on_card else "host", free, moments)


PRICE = RolloutPrice(
    contents=_contents,
    libraries="engine_process",
    plan=plan_problems,
    starts=_find_unstarted,
    shares=_find_crowded,
    here=free_share,
)
