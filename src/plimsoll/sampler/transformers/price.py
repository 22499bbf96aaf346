"""The memory of the engine on `generate` of transformers."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.sampler.price import EngineProcess, RolloutPrice, samples_in
from plimsoll.timeline.items import Allocation, Item


def _contents(process: EngineProcess) -> Iterator[Allocation]:
    """Yield the weights, a KV cache that has grown to the longest response, and the logits.

    One layer of the cache is counted twice, because torch copies a layer to append to it.
    """
    sampler, moments = process.sampler, process.moments
    shape, element = sampler.shape, sampler.element
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    sequences, longest = sampler.sequences, sampler.longest
    cache = sequences * longest * token
    logits = sequences * shape.vocabulary * (element + 2 * 4)
    words = f"{sequences} sequences x {longest:,} tokens x {token:,} bytes"
    widths = f"{sequences} sequences x {shape.vocabulary:,} x ({element} + 2 x 4) bytes"

    sampling = frozenset(m for m in moments if samples_in(sampler.rollout, m.phase))

    def item(name: str, size: int, formula: str, cache: bool = False) -> Item:
        source = "sampler/transformers/engine.py: generate of transformers with its DynamicCache"
        words = formula, source
        return Item("rollout", "rollout engines", name, "device", "allocated", size, *words, cache)

    weights = item("weights", element * shape.parameters, f"{element} bytes x {shape.parameters:,}")
    words = f"{words}, and one layer of it twice"
    kept = item("KV cache", cache + cache // shape.layers, words, cache=True)
    yield Allocation(weights, moments)
    yield Allocation(kept, sampling)
    yield Allocation(item("logits", logits, widths), sampling)


PRICE = RolloutPrice(contents=_contents)
