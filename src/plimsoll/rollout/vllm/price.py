"""The price of an engine on vLLM, for the plan."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.rollout.price import EngineProcess, RolloutPrice, receiving_items
from plimsoll.rollout.vllm.holdings import card_items, cpu_items, reload_items, sleep_items
from plimsoll.rollout.vllm.plan_rules import free_share, plan_problems
from plimsoll.rollout.vllm.sampler import vllm_sampler
from plimsoll.rollout.vllm.shortages import find_crowded, find_unstarted
from plimsoll.timeline.items import Allocation, Where


def _contents(process: EngineProcess) -> Iterator[Allocation]:
    """Yield what a process of an engine holds.

    It is the engine's front, the part of the engine on a card, or the whole engine.
    """
    sampler, moments, bucket = vllm_sampler(process.sampler), process.moments, process.bucket
    whole = process.device == "cpu" and sampler.vllm.parts == 1
    if process.kind == "engine":
        yield from receiving_items("file in shared memory", bucket, moments)
    if process.kind != "engine worker" and not whole:
        return
    sampler = sampler.stages[sampler.vllm.stage_of(process.part)]
    yield from receiving_items("received weights", bucket, moments)
    yield from sleep_items(sampler, moments)
    if not sampler.vllm.takes_adapter_alone:
        where: Where = "host" if process.device == "cpu" else "device"
        yield from reload_items(sampler, where, bucket, moments)
    if process.device == "cpu":
        yield from cpu_items(sampler, moments)
    else:
        assert process.card is not None
        yield from card_items(sampler, process.card.usable_bytes, process.context, moments)


PRICE = RolloutPrice(
    contents=_contents,
    libraries="engine_process",
    plan=plan_problems,
    starts=find_unstarted,
    shares=find_crowded,
    here=free_share,
)
