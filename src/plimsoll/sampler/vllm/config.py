"""The settings of vLLM's engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plimsoll.config.base import OptionValue, PositiveFloat, PositiveInt, Share
from plimsoll.config.engines import HasEngine, RolloutEngineConfig

ArgumentValue = OptionValue | list[Any] | dict[str, Any]
"""The values that an argument of vLLM may have."""


def _with_lists(value: object) -> object:
    """Return the value with lists where YAML gave tuples, as vLLM takes them."""
    if isinstance(value, dict):
        return {name: _with_lists(entry) for name, entry in value.items()}
    return [_with_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


class VllmConfig(RolloutEngineConfig):
    """vLLM: fast, in Ray actors."""

    tensor_parallel: PositiveInt = 1
    """GPUs (or CPU processes) per engine, or per stage of it; each has a part of every layer."""
    pipeline_parallel: PositiveInt = 1
    """Stages per engine, each with consecutive layers on `tensor_parallel` GPUs of its own."""
    sleep_level: Literal[0, 1, 2] = 0
    """What shared engines give up while the ranks train. 0: nothing. 1: the KV cache; weights move
    to host memory. 2: both are dropped. A sync brings all weights (not with `adapter: separate`),
    so 2 spares two copies of them in each step."""
    memory_share: Share = 0.5
    """The share of the card's total memory that vLLM takes (its gpu_memory_utilization)."""
    cpu_kv_cache_gib: PositiveFloat = 0.5
    """Size of the KV cache on CPU, GiB per engine, or per process of it."""
    adapter: Literal["merged", "separate"] = "merged"
    """How an actor's adapter gets to the engines. merged: as full weights, merged out of place;
    separate: the adapter alone, by vLLM's LoRA: a small part of the bytes, with slower sampling."""
    arguments: Annotated[dict[str, ArgumentValue], BeforeValidator(_with_lists)] = Field(default={})
    """Further arguments of vLLM's AsyncEngineArgs by their names, such as enforce_eager,
    max_num_batched_tokens or kv_cache_dtype."""

    @property
    def degrees(self) -> Mapping[str, int]:
        """The numbers of GPUs (or CPU processes) that divide an engine, by their config keys."""
        return {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
        }

    @property
    def has_front(self) -> bool:
        """Whether requests go to another process than the processes on the cards."""
        return True

    def rounds_as(self, dtype: str) -> str:
        """Return the format of the weights that vLLM rounds, or else the dtype."""
        quantization = str(self.arguments.get("quantization"))
        return "float4" if "fp4" in quantization else "float8" if "fp8" in quantization else dtype

    def stage_of(self, part: int) -> int:
        """Return the number of a part's stage.

        The parts that divide its layers come one after another (vllm/distributed/parallel_state.py,
        `initialize_model_parallel`).
        """
        return part // self.tensor_parallel

    @property
    def sleep_key(self) -> str | None:
        """The key by which the engine gives memory up while the ranks train; None: it does not."""
        return "sleep_level" if self.sleep_level else None

    @property
    def forgets_weights(self) -> bool:
        """Whether the engine drops its weights when it sleeps, so that each sync must bring all."""
        return self.sleep_level == 2

    @property
    def as_published(self) -> bool:
        """Whether weights come by the names and in the layout of a model's files."""
        return True

    @property
    def takes_adapter_alone(self) -> bool:
        """Whether the actor's adapter goes to the engine without its base model."""
        return self.adapter == "separate"

    @property
    def returns_routing(self) -> bool:
        """Whether the engine can say which experts it took for each token."""
        return True


SAMPLING = VllmConfig


def vllm_of(section: HasEngine) -> VllmConfig:
    """Return the vLLM settings of a section, whose engine must be vLLM."""
    return section.settings_of(VllmConfig)
