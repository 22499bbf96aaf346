"""vLLM's own arguments, under `rollout.vllm.arguments`: which it has, and which Plimsoll sets.

They are checked by name, against the installed version, whose file is read and not imported: it
needs torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from plimsoll.config.problems import Problem, invalid, show
from plimsoll.rollout.vllm.config import VllmConfig

_CLASSES = ("EngineArgs", "AsyncEngineArgs")

OWNED = {
    "model": "actor.model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_tokens and rollout.sampling.max_new_tokens",
    "max_num_seqs": "rollout.vllm.max_sequences",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "pipeline_parallel_size": "rollout.vllm.pipeline_parallel",
    "data_parallel_size": "rollout.engines",
    "gpu_memory_utilization": "rollout.vllm.memory_share",
    "kv_cache_memory_bytes": "rollout.vllm.memory_share, or on CPU rollout.vllm.cpu_kv_cache_gib",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "enable_lora": "rollout.vllm.adapter",
    "max_lora_rank": "actor.adapter.rank",
    "max_loras": "rollout.vllm.adapter",
    "seed": "run.seed",
    "trust_remote_code": "actor.model.trust_remote_code",
    "weight_transfer_config": "rollout.sync.bucket_bytes",
}
"""Names that Plimsoll sets, and the key to write instead."""

FIXED = {
    "logprobs_mode": "The sampler's log-probs must be those of the distribution sampled from.",
    "logits_processors": "Only rollout.sampling may change what is sampled from.",
    "generation_config": "Only rollout.sampling may change what is sampled from.",
    "override_generation_config": "Only rollout.sampling may change what is sampled from.",
    "enable_chunked_prefill": "On CPU it breaks the seeds of sampling; on GPUs it is on.",
    "worker_cls": "The weights are received in vLLM's own worker.",
    "worker_extension_cls": "The weights are received through Plimsoll's.",
}
"""Names that nobody may set, and why."""


def check_arguments(vllm: VllmConfig) -> Iterator[Problem]:
    """Yield what is wrong with the names under `rollout.vllm.arguments`."""
    known = _known() if vllm.arguments else None
    for name, value in vllm.arguments.items():
        key, given = f"rollout.vllm.arguments.{name}", show(value)
        if name in OWNED:
            why, fix = "Plimsoll sets it, from its own settings.", f"write {OWNED[name]} instead"
            yield invalid(key, given, why, fix, code="vllm-argument")
        elif name in FIXED:
            yield invalid(key, given, FIXED[name], "leave it out", code="vllm-argument")
        elif known is not None and name not in known:
            near = difflib.get_close_matches(name, sorted(known - OWNED.keys()), n=1)
            fix = f"{near[0]}, or leave it out" if near else "leave it out"
            why = "The installed vLLM has no such argument of its AsyncEngineArgs."
            yield invalid(key, given, why, fix, code="vllm-argument")


@cache
def _known() -> frozenset[str] | None:
    """Return the arguments of the installed vLLM's engine; None if none is installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    file = Path(vllm.submodule_search_locations[0], "engine", "arg_utils.py")
    return frozenset(
        line.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )
