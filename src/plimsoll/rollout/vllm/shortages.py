"""The errors of vLLM engines that have too little memory, without the ways out."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem
from plimsoll.rollout.price import CrowdedCard, EngineSite
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.holdings import GIB, card_share, tightest_stage
from plimsoll.rollout.vllm.sampler import VllmSampler, vllm_sampler
from plimsoll.run.counting import gigabytes


def find_unstarted(site: EngineSite, card_bytes: int | None) -> Iterator[Problem]:
    """Yield the error of engines that would not start, or not hold one sequence.

    Args:
        site: the engines and their hardware.
        card_bytes: bytes of the smallest card of an engine; None on the CPU.
    """
    sampler = vllm_sampler(site.sampler)
    return _cpu_cache(sampler) if card_bytes is None else _share(sampler, card_bytes)


def _share(sampler: VllmSampler, card_bytes: int) -> Iterator[Problem]:
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


def _cpu_cache(sampler: VllmSampler) -> Iterator[Problem]:
    token = max(stage.kv_token for stage in sampler.stages)
    requested, needed = sampler.vllm.cpu_kv_cache_gib, token * sampler.longest
    if requested * GIB >= needed:
        return
    yield Problem(
        "vllm-cache",
        "error",
        f"rollout.vllm.cpu_kv_cache_gib is {requested:g}, and the KV cache of one sequence takes "
        f"{needed / GIB:.2g} GiB",
        f"a sequence may be {sampler.longest:,} tokens long; vLLM would not start",
    )


def find_crowded(site: EngineSite, card: CrowdedCard) -> Iterator[Problem]:
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
