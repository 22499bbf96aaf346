"""The model and work of an engine that samples, whichever it is; and what the one on `generate` of
transformers holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll.config.model import ELEMENT_BYTES
from plimsoll.config.rollout import RolloutConfig
from plimsoll.rollout.speculation import (
    CACHE_BYTES,
    FROM_TEXT,
    Speculation,
    proposer,
    speculation_of,
    unpriced_speculation,
)
from plimsoll.rollout.stages import Stage, stages_of
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.items import Allocation, Item, Moment

STARTING = Moment("load", "start engines")
"""Engines take their share before the ranks read their models."""
_BATCHED_TOKENS = 2048  # vLLM: SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
_CHUNK = 2**30
"""Bytes of the logits that vLLM verifies at once, in fp32."""
KEPT_ASLEEP = "sleep_preserve_parameter_names"
"""vLLM's argument: what of the weights stays on the host at sleep level 2."""
_HOLDING = frozenset(
    {
        *("block_size", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes"),
        *("disable_hybrid_kv_cache_manager", "enable_dbo", "enable_eplb", "enable_expert_parallel"),
        *("fully_sharded_loras", "hf_overrides", "kv_cache_dtype", "kv_cache_dtype_skip_layers"),
        *("kv_offloading_size", "kv_transfer_config", "max_cpu_loras"),
        *("max_cudagraph_capture_size", "max_num_batched_tokens", "num_gpu_blocks_override"),
        *("offload_group_size", "optimization_level", "performance_mode", "quantization"),
        *("quantization_config", KEPT_ASLEEP),
    }
)
"""Arguments of vLLM's that change what it holds."""
_PER_CHANNEL, _PER_TENSOR = "fp8_per_channel", "fp8_per_tensor"
_ON_CPU = _PER_CHANNEL
FP8_UNITS = (8, 9)
"""The compute capability from which on cards multiply fp8 (vLLM 0.32: quantization/online/fp8.py,
`Fp8PtpcOnlineLinearMethod`). Older ones unpack it, by the Marlin kernel."""
QUANTIZED: Mapping[str, float] = {
    **dict.fromkeys((_PER_TENSOR, _PER_CHANNEL, "fp8_per_block", "fp8"), 1.0),
    "mxfp8": 1 + 1 / 32,
    "mxfp4": 1 / 2 + 1 / 32,
}
"""Bytes of a linear layer's weight by vLLM's `quantization`, where vLLM rounds a model of 16 bits
itself (vLLM 0.32: config/quantization.py, `_ONLINE_SHORTHANDS`; `fp8` is its older name of
fp8_per_tensor). A scale of a byte for each 32 weights counts; those of whole channels are few."""


def has_dropped_draft(rollout: RolloutConfig) -> bool:
    """Whether sleep level 2 would drop a model that proposes tokens, which no sync brings."""
    method = proposer(rollout)
    return method is not None and method not in FROM_TEXT and KEPT_ASLEEP not in rollout.vllm


def keeps_weights(rollout: RolloutConfig) -> bool:
    """Whether engines that sleep must keep weights, because no sync brings them: of the model under
    an adapter that is sent alone, or of a draft."""
    return rollout.sync.adapter == "separate" or has_dropped_draft(rollout)


def quantized_bytes(rollout: RolloutConfig) -> float | None:
    """Return the bytes of a weight that vLLM quantises as it loads it; None for an engine whose
    weights keep `rollout.dtype`."""
    return QUANTIZED.get(str(rollout.vllm.get("quantization")))


def against_quantization(
    rollout: RolloutConfig, device: str, capability: tuple[int, int] | None
) -> tuple[str, str] | None:
    """Return why vLLM 0.32 would not start with its `quantization`, and what to write instead; None
    where it does, or where that cannot be told.

    Args:
        capability: the compute capability of the run's oldest card; None: unknown.
    """
    name = rollout.vllm.get("quantization")
    if name not in QUANTIZED:
        return None
    key = "rollout.vllm.quantization"
    if rollout.dtype == "float32":
        why = "vLLM quantises models of 16 bits, and rollout.dtype is float32"
        return why, "rollout.dtype: bfloat16, or leave it out"
    if device == "cpu" and name != _ON_CPU:
        why = "on the CPU vLLM has kernels for few layers of this kind"
        return why, f"{key}: {_ON_CPU}, or leave it out"
    if name == _PER_CHANNEL and device == "cuda" and (capability or FP8_UNITS) < FP8_UNITS:
        why = "its kernels need units for fp8, which cards have from compute capability 8.9 on"
        return why, f"{key}: {_PER_TENSOR}, or leave it out"
    return None


def narrow_weights(capability: tuple[int, int] | None) -> str:
    """Return the `quantization` of vLLM's with which an engine on such a card has weights of 8
    bits, as exact as its kernels allow."""
    return _PER_CHANNEL if (capability or FP8_UNITS) >= FP8_UNITS else _PER_TENSOR


def unpriced(rollout: RolloutConfig) -> tuple[str, ...]:
    """What under `rollout.vllm` changes what vLLM holds and is not counted by the plan: arguments,
    and what of its speculative decoding, as `key: value`."""
    vllm = rollout.vllm
    cache, batch = vllm.get("kv_cache_dtype"), vllm.get("max_num_batched_tokens")
    counted = {
        "kv_cache_dtype": cache is None or cache == "auto" or cache in CACHE_BYTES,
        "max_num_batched_tokens": batch is None or isinstance(batch, int),
        "quantization": vllm.get("quantization") in (None, *QUANTIZED),
    }
    names = (name for name in vllm if name in _HOLDING and not counted.get(name, False))
    return (*names, *unpriced_speculation(rollout))


@dataclass(frozen=True)
class Sampler:
    """An engine's model and work. longest: tokens of the longest prompt with its response.
    sequences: that are sampled at once. adapter_rank: as of `EngineSpec`. speculation: what
    proposes tokens beside the model. stage: the one whose cards are priced; None: as if there were
    one."""

    rollout: RolloutConfig
    shape: ModelShape
    longest: int
    sequences: int
    adapter_rank: int | None = None
    speculation: Speculation = field(default_factory=Speculation)
    stage: Stage | None = None

    @property
    def stages(self) -> tuple[Sampler, ...]:
        """Each of the engine's."""
        stages = stages_of(self.shape.layers, self.rollout.pipeline_parallel)
        return tuple(replace(self, stage=stage) for stage in stages)

    @property
    def held(self) -> ModelShape:
        """What the stage has of the model."""
        return self.shape if self.stage is None else self.stage.held(self.shape)

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return ELEMENT_BYTES[self.rollout.dtype]

    @property
    def models(self) -> tuple[ModelShape, ...]:
        """The stage's part of the model, and where tokens are sampled what drafts for it."""
        draft = self.speculation.draft if self.samples else None
        return (self.held, *filter(None, [draft]))

    @property
    def weights(self) -> int:
        """Bytes of the weights on each of the engine's cards; norms are on all of them. vLLM's
        `quantization` is of the model's linear layers: embeddings and heads keep the dtype, and a
        draft model is what it is."""
        model, *draft = self.models
        narrow = quantized_bytes(self.rollout)
        return self._weights(model, narrow) + sum(self._weights(one, None) for one in draft)

    def _weights(self, shape: ModelShape, narrow: float | None) -> int:
        whole = shape.other_parameters
        divided = self.element * (shape.parameters - whole)
        if narrow is not None:
            matrices = sum(one.count * one.inputs * one.outputs for one in shape.linears)
            divided -= int((self.element - narrow) * matrices)
        return -(-divided // self.rollout.tensor_parallel) + self.element * whole

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest batch of a forward."""
        found = self.rollout.vllm.get("max_num_batched_tokens")
        return found if isinstance(found, int) else _BATCHED_TOKENS

    @property
    def kv_token(self) -> int:
        """Bytes of the KV cache of one token on each card, a draft model's among them."""
        own = self.rollout.vllm.get("kv_cache_dtype")
        dtypes = own, self.speculation.draft_cache or own
        return sum(map(self._kv_token, self.models, dtypes))

    def _kv_token(self, shape: ModelShape, dtype: object) -> int:
        heads = -(-shape.kv_heads // self.rollout.tensor_parallel)
        element = CACHE_BYTES.get(str(dtype), self.element)
        return 2 * shape.layers * heads * shape.head_dim * element

    @property
    def profile_peak(self) -> int:
        """Bytes of the profiled forward at its peak, on each card: the MLP of the largest batch of
        tokens, or where tokens are sampled the logits of as many sequences as may run, in 16 bits
        and three times in fp32."""
        shape, parallel = self.shape, self.rollout.tensor_parallel
        width = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate)
        forward = self._most_tokens * self.element * (4 * shape.hidden + 3 * width // parallel)
        logits = self.rollout.max_sequences * self._sampled * (self.element + 3 * 4)
        return max(forward, logits)

    @property
    def handed_over(self) -> int:
        """Bytes, on each card, of the buffer for what the stage before gives: hidden states and
        residuals of the largest batch (v1/worker/gpu/model_runner.py); none in the first."""
        if self.stage is None or self.stage.first:
            return 0
        return 2 * self._most_tokens * self.shape.hidden * self.element

    @property
    def _most_tokens(self) -> int:
        return max(self.batched_tokens, self.rollout.max_sequences)

    @property
    def samples(self) -> bool:
        """Whether the stage has the output head."""
        return self.stage is None or self.stage.last

    @property
    def _sampled(self) -> int:
        """The vocabulary, where tokens are sampled from it."""
        return self.shape.vocabulary if self.samples else 0

    @property
    def token_counts(self) -> int:
        """Bytes, on each card, in which vLLM counts what each sequence has of every token, whether
        penalties are asked for or not (v1/worker/gpu/sample/penalties.py): a count and a bit."""
        words = self._sampled + -(-self._sampled // 32)
        return 4 * self.rollout.max_sequences * words

    @property
    def draft_logits(self) -> int:
        """Bytes, on each card, of a draft's logits that are kept until its tokens are verified
        (vLLM's `draft_sample_method: probabilistic`)."""
        proposed = self.rollout.max_sequences * self.speculation.tokens
        return proposed * self._sampled * self.element * self.speculation.keeps_logits

    @property
    def verifying(self) -> int:
        """Bytes, on each card, that verifying proposed tokens takes beyond the forward that vLLM
        profiled, which has one token of each sequence: the logits of all, and of a part of them in
        fp32 (v1/worker/gpu/spec_decode/rejection_sampler.py)."""
        each = self.rollout.max_sequences * (1 + self.speculation.tokens)
        logits = min(each, self.batched_tokens) * self._sampled
        return max(0, logits * self.element + min(4 * logits, _CHUNK) - self.profile_peak)

    @property
    def adapter_room(self) -> int:
        """Bytes on each card of vLLM's matrices for one adapter: two around every linear layer,
        adapted or not, divided as that layer is on its wider side (vllm/lora/layers)."""
        parallel = self.rollout.tensor_parallel
        sides = 0
        for linear in self.held.linears:
            whole, divided = linear.inputs, linear.outputs
            if linear.outputs == self.shape.hidden:  # by its inputs
                whole, divided = divided, whole
            sides += linear.count * (whole + -(-divided // parallel))
        return self.element * (self.adapter_rank or 0) * sides


def sampler_of(spec: RunSpec[Any], policy: ModelShape) -> Sampler | None:
    """Return the model and work of each engine of a run; None without engines.

    Args:
        policy: the shape of the model that engines sample with.
    """
    sampling, engines = spec.sampling, spec.engines
    if sampling is None or engines is None:
        return None
    most = engines.max_sequences
    return Sampler(
        engines,
        policy,
        spec.longest_of("actor")[0],
        most if spec.data.eval else min(most, sampling.sequences),
        spec.adapter_room,
        speculation_of(engines),
    )


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
