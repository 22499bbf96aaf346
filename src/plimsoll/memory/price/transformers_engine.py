"""What an engine on `generate` of transformers holds."""

from __future__ import annotations

from plimsoll.memory.items import Held, Item, Moment
from plimsoll.memory.price.engines import Sampler


def transformers_items(sampler: Sampler, moments: frozenset[Moment]) -> tuple[Held, ...]:
    """A whole model, and a KV cache that grows to the longest response and, as torch concatenates
    it, has one layer twice."""
    shape, element = sampler.shape, sampler.element
    sequences, longest = sampler.sequences, sampler.longest
    cache = sequences * longest * sampler.kv_token
    logits = sequences * shape.vocabulary * (element + 2 * 4)
    sampling = frozenset(m for m in moments if m.phase == "rollout")

    def held(name: str, size: int, formula: str, when: frozenset[Moment]) -> Held:
        source = "rollout/transformers.py: generate of transformers with its DynamicCache"
        return Held(Item("rollout", name, "device", "allocated", size, formula, source), when)

    return (
        held("weights", sampler.weights, f"{element} bytes x {shape.parameters:,}", moments),
        held(
            "KV cache",
            cache + cache // shape.layers,
            f"{sequences} sequences x {longest:,} tokens x {sampler.kv_token:,} bytes, and one "
            "layer of it twice",
            sampling,
        ),
        held(
            "logits",
            logits,
            f"{sequences} sequences x {shape.vocabulary:,} x ({element} + 2 x 4) bytes",
            sampling,
        ),
    )
