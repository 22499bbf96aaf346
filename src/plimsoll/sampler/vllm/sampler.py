"""An engine of vLLM: the model, arguments and work that decide how much memory it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from plimsoll.config.base import AUTO
from plimsoll.config.engine import ELEMENT_BYTES
from plimsoll.config.rollout import RolloutConfig
from plimsoll.sampler.price import Sampler
from plimsoll.sampler.vllm.config import VllmConfig, vllm_of
from plimsoll.sampler.vllm.speculation import (
    CACHE_BYTES,
    FROM_TEXT,
    Speculation,
    proposer,
    speculation_of,
    unpriced_speculation,
)
from plimsoll.shapes.shape import Linear, ModelShape

_BATCHED_TOKENS = 2048  # vLLM: SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
_MOST_BATCHED = 8192
"""The most tokens of a forward on a card that are chosen here: vLLM's own choice for cards of less
than 70 GiB that sample offline. More made A100s slower (vllm/engine/arg_utils.py)."""
_BATCH_STEP = 1024
_COPIED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Linears of which each card has all: those of latent attention that come before its heads (vLLM:
models/deepseek_v2.py, `fused_qkv_a_proj`)."""
_CHUNK = 2**30
"""Bytes of the logits that vLLM verifies at once, in fp32."""
KEPT_ASLEEP = "sleep_preserve_parameter_names"
"""The argument of vLLM that names the weights that stay on the host at sleep level 2."""
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
"""Arguments of vLLM that change how much memory it holds."""
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
fp8_per_tensor). Scales of one byte for each 32 weights count; scales of full channels are few."""


def has_dropped_draft(vllm: VllmConfig) -> bool:
    """Return whether sleep level 2 would drop a draft model, which no sync brings back."""
    method = proposer(vllm)
    return method is not None and method not in FROM_TEXT and KEPT_ASLEEP not in vllm.arguments


def keeps_weights(vllm: VllmConfig) -> bool:
    """Return whether sleeping engines must keep weights, because no sync brings them.

    No sync brings a draft model, or the base of an adapter that is sent alone.
    """
    return vllm.takes_adapter_alone or has_dropped_draft(vllm)


def quantized_bytes(vllm: VllmConfig) -> float | None:
    """Return the bytes of each weight that vLLM quantises when it loads a model.

    Return None for an engine whose weights keep `rollout.dtype`.
    """
    return QUANTIZED.get(str(vllm.arguments.get("quantization")))


def against_quantization(
    rollout: RolloutConfig, device: str, capability: tuple[int, int] | None
) -> tuple[str, str] | None:
    """Return why vLLM 0.32 would not start with its `quantization`, and what to write instead.

    Return None if it starts, or if that is not known.

    Args:
        rollout: the settings of the engines.
        device: "cuda" or "cpu".
        capability: the compute capability of the run's oldest card; None: unknown.
    """
    name = vllm_of(rollout).arguments.get("quantization")
    if name not in QUANTIZED:
        return None
    key = "rollout.vllm.arguments.quantization"
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
    """Return the `quantization` of vLLM that gives an engine on such a card weights of 8 bits.

    It is the most exact one for which the card has kernels.
    """
    return _PER_CHANNEL if (capability or FP8_UNITS) >= FP8_UNITS else _PER_TENSOR


def unpriced(vllm: VllmConfig) -> tuple[str, ...]:
    """Return the `rollout.vllm.arguments` that change vLLM's memory and are not in the plan.

    Arguments are given by name, parts of speculative decoding as `key: value`.
    """
    arguments = vllm.arguments
    cache = arguments.get("kv_cache_dtype")
    batch = arguments.get("max_num_batched_tokens")
    counted = {
        "kv_cache_dtype": cache is None or cache == AUTO or cache in CACHE_BYTES,
        "max_num_batched_tokens": batch is None or isinstance(batch, int),
        "quantization": arguments.get("quantization") in (None, *QUANTIZED),
    }
    names = (name for name in arguments if name in _HOLDING and not counted.get(name, False))
    return (*names, *unpriced_speculation(vllm))


def forward_bytes(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Return the bytes that each token of a forward takes at its peak, on each card: the MLP's."""
    width = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate)
    divided = 3 * width // vllm_of(rollout).tensor_parallel
    return ELEMENT_BYTES[rollout.dtype] * (4 * shape.hidden + divided)


def logits_bytes(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Return the bytes of the logits of as many sequences as may run.

    They exist in the engine's dtype and three times in fp32.
    """
    return rollout.max_sequences * shape.vocabulary * (ELEMENT_BYTES[rollout.dtype] + 3 * 4)


def batch_on_card(shape: ModelShape, rollout: RolloutConfig) -> int:
    """Return the most tokens of a forward on a card: vLLM's `max_num_batched_tokens`.

    Unless `rollout.vllm.arguments` gives the number, the forward takes no more memory than the
    logits do at another time: prompts are read in fewer forwards than with vLLM's default, and the
    KV cache is as large. Engines in stages keep vLLM's default, as most of their cards have no
    logits.
    """
    vllm = vllm_of(rollout)
    given = vllm.arguments.get("max_num_batched_tokens")
    if isinstance(given, int):
        return given
    free = logits_bytes(shape, rollout) // forward_bytes(shape, rollout)
    free = min(_MOST_BATCHED, free // _BATCH_STEP * _BATCH_STEP)
    most = _BATCHED_TOKENS if vllm.pipeline_parallel > 1 else max(_BATCHED_TOKENS, free)
    return max(most, rollout.max_sequences)


@dataclass(frozen=True)
class Stage:
    """A stage of an engine: consecutive layers of the model, on cards of its own.

    Stages are vLLM's pipeline parallelism.

    Attributes:
        layers: the number of its layers.
        first: whether it embeds.
        last: whether it has the output head, and samples.
    """

    layers: int
    first: bool
    last: bool

    def part_of(self, shape: ModelShape) -> ModelShape:
        """Return the stage's part of a model, whose layers are taken to be alike.

        Its table is the embedding in the first stage and the head in the last, also where both are
        one tensor (models/qwen2.py). A stage between them has no table: a vocabulary of 0.
        """
        if self.first and self.last:
            return shape

        def part_of(count: int) -> int:
            return -(-count * self.layers // shape.layers)

        return replace(
            shape,
            layers=self.layers,
            vocabulary=shape.vocabulary if self.first or self.last else 0,
            tied=True,
            head_bias=shape.head_bias and self.last,
            linears=tuple(replace(t, count=part_of(t.count)) for t in shape.linears),
            other_tensors=tuple(
                replace(t, parameters=t.elements * part_of(t.parameters // t.elements))
                for t in shape.other_tensors
            ),
        )


def stages_of(layers: int, count: int) -> tuple[Stage, ...]:
    """Return the stages over which vLLM 0.32 divides layers.

    All stages get equally many layers. Layers left over go one each to the stages before the last
    one, the latest first (distributed/utils.py, `get_pp_indices`).
    """
    each, left = divmod(layers, count)
    return tuple(
        Stage(each + (count - 1 - left <= i < count - 1), i == 0, i == count - 1)
        for i in range(count)
    )


@dataclass(frozen=True)
class VllmSampler(Sampler):
    """An engine of vLLM: model and work, or one stage of it.

    Attributes:
        speculation: the proposer of tokens beside the model.
        stage: the stage whose cards are priced; None: priced as a single stage.
    """

    speculation: Speculation = field(default_factory=Speculation)
    stage: Stage | None = None

    @cached_property
    def vllm(self) -> VllmConfig:
        """The engine's own settings."""
        return vllm_of(self.rollout)

    @property
    def stages(self) -> tuple[VllmSampler, ...]:
        """All stages of the engine."""
        stages = stages_of(self.shape.layers, self.vllm.pipeline_parallel)
        return tuple(replace(self, stage=stage) for stage in stages)

    @property
    def stage_shape(self) -> ModelShape:
        """The stage's part of the model."""
        return self.shape if self.stage is None else self.stage.part_of(self.shape)

    @property
    def models(self) -> tuple[ModelShape, ...]:
        """The stage's part of the model and, where tokens are sampled, the draft model."""
        draft = self.speculation.draft if self.samples else None
        return (self.stage_shape, *filter(None, [draft]))

    @property
    def weights(self) -> int:
        """Bytes of the weights on each of the engine's cards; every card has all norms.

        vLLM's `quantization` applies to the model's linear layers: embeddings and heads keep the
        dtype, and a draft model is not changed.
        """
        model, *draft = self.models
        narrow = quantized_bytes(self.vllm)
        return self._weights(model, narrow) + sum(self._weights(shape, None) for shape in draft)

    def _weights(self, shape: ModelShape, narrow: float | None) -> int:
        def saved(linears: Iterable[Linear]) -> int:
            matrices = sum(x.count * x.inputs * x.outputs for x in linears)
            return 0 if narrow is None else int((self.element - narrow) * matrices)

        copied = [linear for linear in shape.linears if linear.name in _COPIED]
        others = [linear for linear in shape.linears if linear.name not in _COPIED]
        whole = shape.other_parameters + sum(linear.parameters for linear in copied)
        divided = self.element * (shape.parameters - whole) - saved(others)
        return -(-divided // self.vllm.tensor_parallel) + self.element * whole - saved(copied)

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest batch of a forward on a card.

        On the CPU vLLM chooses the batch; where nothing is given, the peak is that of the logits or
        of vLLM's default there, too.
        """
        return batch_on_card(self.shape, self.rollout)

    @property
    def kv_token(self) -> int:
        """Bytes of the KV cache of one token on each card, a draft model's among them."""
        engine_dtype = self.vllm.arguments.get("kv_cache_dtype")
        dtypes = engine_dtype, self.speculation.draft_cache or engine_dtype
        return sum(map(self._kv_token, self.models, dtypes))

    def _kv_token(self, shape: ModelShape, dtype: object) -> int:
        element = CACHE_BYTES.get(str(dtype), self.element)
        return shape.cached_numbers(self.vllm.tensor_parallel) * element

    @property
    def profile_peak(self) -> int:
        """Bytes of the profiled forward at its peak, on each card.

        That is the MLP of the largest batch of tokens or, where tokens are sampled, the logits of
        as many sequences as may run, in 16 bits and three times in fp32.
        """
        forward = self.batched_tokens * forward_bytes(self.shape, self.rollout)
        logits = logits_bytes(self.shape, self.rollout) if self.samples else 0
        return max(forward, logits)

    @property
    def handed_over(self) -> int:
        """Bytes, on each card, of the buffer for the output of the stage before; 0 in the first.

        It holds hidden states and residuals of the largest batch (v1/worker/gpu/model_runner.py).
        """
        if self.stage is None or self.stage.first:
            return 0
        return 2 * self.batched_tokens * self.shape.hidden * self.element

    @property
    def samples(self) -> bool:
        """Whether the stage has the output head."""
        return self.stage is None or self.stage.last

    @property
    def _sampled_vocabulary(self) -> int:
        """The size of the vocabulary in a stage that samples, else 0."""
        return self.shape.vocabulary if self.samples else 0

    @property
    def token_counts(self) -> int:
        """Bytes, on each card, of vLLM's counts of each token of the vocabulary in each sequence.

        vLLM holds a count (4 bytes) and a bit for each, also without penalties
        (v1/worker/gpu/sample/penalties.py).
        """
        words = self._sampled_vocabulary + -(-self._sampled_vocabulary // 32)
        return 4 * self.rollout.max_sequences * words

    @property
    def draft_logits(self) -> int:
        """Bytes, on each card, of a draft's logits that are kept until its tokens are verified.

        vLLM keeps them with its `draft_sample_method: probabilistic`.
        """
        proposed = self.rollout.max_sequences * self.speculation.tokens
        return proposed * self._sampled_vocabulary * self.element * self.speculation.keeps_logits

    @property
    def verifying(self) -> int:
        """Bytes, on each card, that verifying proposed tokens takes beyond the profiled forward.

        The profiled forward has one token of each sequence. Verifying holds the logits of all
        tokens, and of a part of them in fp32 (v1/worker/gpu/spec_decode/rejection_sampler.py).
        """
        each = self.rollout.max_sequences * (1 + self.speculation.tokens)
        logits = min(each, self.batched_tokens) * self._sampled_vocabulary
        return max(0, logits * self.element + min(4 * logits, _CHUNK) - self.profile_peak)

    @property
    def adapter_room(self) -> int:
        """Bytes, on each card, of vLLM's matrices for one adapter; 0 without room for one.

        Every linear layer, adapted or not, has two; experts only if they are adapted. One of them
        is divided, as the layer is, on the layer's wider side (vllm/lora/layers).
        """
        parallel = self.vllm.tensor_parallel
        sides = 0
        every = self.stage_shape.linears
        for linear in (each for each in every if each.stacked == 1 or self.adapts_experts):
            whole, divided = linear.inputs, linear.outputs
            if linear.outputs == self.shape.hidden:  # by its inputs
                whole, divided = divided, whole
            sides += linear.count * (whole + -(-divided // parallel))
        return self.element * (self.adapter_rank or 0) * sides


def vllm_sampler(sampler: Sampler) -> VllmSampler:
    """Return an engine's model and work in the form for vLLM, with its proposer of tokens."""
    return VllmSampler(**vars(sampler), speculation=speculation_of(vllm_of(sampler.rollout)))
