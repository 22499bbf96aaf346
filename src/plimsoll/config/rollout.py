"""Who samples, how, and how new weights are proved to have arrived."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plimsoll.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionValue,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    Share,
    WrittenPath,
)
from plimsoll.config.model import Dtype

EngineValue = OptionValue | list[Any] | dict[str, Any]
"""What an argument of vLLM's may be."""


def _with_lists(value: object) -> object:
    """As vLLM takes it: what YAML calls a list was read as a tuple."""
    if isinstance(value, dict):
        return {name: _with_lists(one) for name, one in value.items()}
    return [_with_lists(one) for one in value] if isinstance(value, list | tuple) else value


class SamplingConfig(Settings):
    """How responses are sampled."""

    max_new_tokens: PositiveInt = 512
    """The longest response, in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; the trainer's log-probs use the same. 0 is greedy (evaluation only)."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 the sampler's log-probs differ from the trainer's."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens; 0 is all, anything else makes the sampler's
    log-probs differ from the trainer's."""
    min_p: Probability = 0.0
    """Leave out tokens less likely than this share of the most likely one; above 0 the sampler's
    log-probs differ from the trainer's."""
    min_new_tokens: NonNegativeInt = 0
    """No response ends before so many tokens. Where an end is forbidden, the sampler's log-probs
    differ from the trainer's by what an end had."""
    stop: tuple[str, ...] = ()
    """Strings that end a response (the end-of-sequence token always does)."""


class SyncConfig(Settings):
    """Weight sync and its proof."""

    bucket_bytes: PositiveInt = 256 * 1024 * 1024
    """Weights are gathered and sent in buckets of at most this size (or one tensor)."""
    max_logprob_gap: PositiveFloat = 0.05
    """Stop when the mean absolute difference between the engines' and the trainer's log-probs
    of the probe tokens is larger than this (nats)."""
    max_gap_growth: PositiveFloat = 3.0
    """Stop too when that difference is this many times what it was with the first weights, which
    both sides read from the same files."""
    adapter: Literal["merged", "separate"] = "merged"
    """How an actor's adapter gets to the engines. merged: as whole weights, merged out of place;
    separate: the adapter alone, by vLLM's LoRA: a small part of the bytes, with slower sampling."""
    probe_sequences: PositiveInt = 16
    """Sequences in the probe: the first prompts of data.train."""


class ServeConfig(Settings):
    """Where agents find the policy (environments that play by calls of their own)."""

    host: str = "127.0.0.1"
    """The address to listen at; each episode has a key of its own."""
    port: NonNegativeInt = 0
    """0: any that is free."""


class RolloutConfig(Settings):
    """The engines that sample."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """vllm: fast, in Ray actors; transformers: for machines without vLLM."""
    engines: PositiveInt = 1
    """How many engines (data parallel)."""
    tensor_parallel: PositiveInt = 1
    """GPUs (or CPU processes) per engine, or per stage of it; each has a part of every layer."""
    pipeline_parallel: PositiveInt = 1
    """Stages per engine, each with consecutive layers on `tensor_parallel` GPUs of its own."""
    placement: Literal["own", "shared"] = "own"
    """own: engines have GPUs of their own; shared: they use the training ranks' GPUs, in turns or
    side by side."""
    sleep_level: Literal[0, 1, 2] = 0
    """What shared engines give up while the ranks train: 0 nothing, 1 the KV cache, with weights
    moved to host memory, 2 both dropped. A sync brings all weights, but for
    `rollout.sync.adapter: separate`: 2 spares two copies of them in each step."""
    memory_share: Share = 0.5
    """The share of the whole card that vLLM takes (its gpu_memory_utilization)."""
    cpu_kv_cache_gib: PositiveFloat = 0.5
    """Size of the KV cache on CPU, GiB per engine, or per process of it."""
    max_sequences: PositiveInt = 256
    """Sequences that one engine works on at once."""
    dtype: Dtype = "auto"
    """The dtype of the engine's weights and activations. auto: the actor's."""
    vllm: Annotated[dict[str, EngineValue], BeforeValidator(_with_lists)] = Field(default={})
    """vLLM's own settings: arguments of its AsyncEngineArgs by their names, such as enforce_eager,
    max_num_batched_tokens or kv_cache_dtype."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are sampled for training."""
    sync: SyncConfig = SyncConfig()
    """Weight sync and its proof."""
    serve: ServeConfig = ServeConfig()
    """The endpoint for agents; open where an environment is one."""
    replay: WrittenPath | None = None
    """Learn from the trajectories that the run of this directory stored, instead of sampling: no
    engine is started. `--replay RUN` sets it."""

    @property
    def parts(self) -> int:
        """GPUs (or CPU processes) per engine."""
        return self.tensor_parallel * self.pipeline_parallel
