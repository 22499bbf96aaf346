"""The model and work of an engine that samples, whichever it is; and what the one on `generate` of
transformers holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.config.model import ELEMENT_BYTES
from plimsoll.config.rollout import RolloutConfig
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Allocation, Item, Moment

STARTING = Moment("load", "start engines")
"""Engines take their share before the ranks read their models."""
BATCHED_TOKENS = 2048  # vLLM: SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True)
class Sampler:
    """An engine's model and work. longest: tokens of the longest prompt with its response.
    sequences: that are sampled at once. adapter_rank: as of `EngineSpec`."""

    rollout: RolloutConfig
    shape: ModelShape
    longest: int
    sequences: int
    adapter_rank: int | None = None

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return ELEMENT_BYTES[self.rollout.dtype]

    @property
    def weights(self) -> int:
        """Bytes of the weights on each of the engine's cards; norms are on all of them."""
        whole = self.shape.other_parameters
        divided = self.shape.parameters - whole
        return self.element * (-(-divided // self.rollout.tensor_parallel) + whole)

    @property
    def kv_token(self) -> int:
        """Bytes of the KV cache of one token on each card."""
        heads = -(-self.shape.kv_heads // self.rollout.tensor_parallel)
        return 2 * self.shape.layers * heads * self.shape.head_dim * self.element

    @property
    def profile_peak(self) -> int:
        """Bytes of the profiled forward at its peak, on each card: the MLP of the largest batch of
        tokens, or the logits of as many sequences as may run, in 16 bits and three times in fp32.
        """
        shape, parallel = self.shape, self.rollout.tensor_parallel
        width = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate)
        tokens = max(BATCHED_TOKENS, self.rollout.max_sequences)
        forward = tokens * self.element * (4 * shape.hidden + 3 * width // parallel)
        logits = self.rollout.max_sequences * shape.vocabulary * (self.element + 3 * 4)
        return max(forward, logits)

    @property
    def token_counts(self) -> int:
        """Bytes, on each card, in which vLLM counts what each sequence has of every token, whether
        penalties are asked for or not (v1/worker/gpu/sample/penalties.py): a count and a bit."""
        words = self.shape.vocabulary + -(-self.shape.vocabulary // 32)
        return 4 * self.rollout.max_sequences * words

    @property
    def adapter_room(self) -> int:
        """Bytes on each card of vLLM's matrices for one adapter: two around every linear layer,
        adapted or not, divided as that layer is on its wider side (vllm/lora/layers)."""
        parallel = self.rollout.tensor_parallel
        sides = 0
        for linear in self.shape.linears:
            whole, divided = linear.inputs, linear.outputs
            if linear.outputs == self.shape.hidden:  # by its inputs
                whole, divided = divided, whole
            sides += linear.count * (whole + -(-divided // parallel))
        return self.element * (self.adapter_rank or 0) * sides


def transformers_items(sampler: Sampler, moments: frozenset[Moment]) -> tuple[Allocation, ...]:
    """A whole model, and a KV cache that grows to the longest response and, as torch concatenates
    it, has one layer twice."""
    shape, element, token = sampler.shape, sampler.element, sampler.kv_token
    sequences, longest = sampler.sequences, sampler.longest
    cache = sequences * longest * token
    logits = sequences * shape.vocabulary * (element + 2 * 4)
    words = f"{sequences} sequences x {longest:,} tokens x {token:,} bytes"
    widths = f"{sequences} sequences x {shape.vocabulary:,} x ({element} + 2 x 4) bytes"

    sampling = frozenset(m for m in moments if m.phase == "rollout")

    def item(name: str, size: int, formula: str, cache: bool = False) -> Item:
        source = "rollout/transformers.py: generate of transformers with its DynamicCache"
        words = formula, source
        return Item("rollout", "rollout engines", name, "device", "allocated", size, *words, cache)

    weights = item("weights", sampler.weights, f"{element} bytes x {shape.parameters:,}")
    words = f"{words}, and one layer of it twice"
    kept = item("KV cache", cache + cache // shape.layers, words, cache=True)
    return (
        Allocation(weights, moments),
        Allocation(kept, sampling),
        Allocation(item("logits", logits, widths), sampling),
    )
