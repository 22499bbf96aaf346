"""The requirements of vLLM on a config, on a model's files and on a machine.

The names under `rollout.vllm.arguments` are checked against the installed vLLM. Its files are read
and not imported, because importing them needs torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.problems import Problem, Section, conflict, invalid, show
from plimsoll.machine.local_host import LocalHost, expands
from plimsoll.resolve.engine_rules import RolloutRules
from plimsoll.resolve.model_files import check_model, read_model_json
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.sampler.vllm.config import VllmConfig, vllm_of
from plimsoll.sampler.vllm.installation import (
    COMPILED,
    OTHER_ENGINE,
    PACKAGES,
    check_build,
    check_labels,
    find_installed,
    find_tools,
    installed_file,
)
from plimsoll.sampler.vllm.speculation import draft_model
from plimsoll.shapes.known_models import head_sizes

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
    "lora_target_modules": "actor.adapter.targets",
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
    "load_format": "Weights are read from safetensors alone, never from pickles.",
    "worker_cls": "The weights are received in vLLM's own worker.",
    "worker_extension_cls": "The weights are received through Plimsoll's.",
}
"""Names that nobody may set, and why."""


def check_arguments(vllm: VllmConfig) -> Iterator[Problem]:
    """Yield the names under `rollout.vllm.arguments` that are unknown, fixed or set by Plimsoll."""
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
    """Return the argument names of the installed vLLM's engine; None if vLLM is not installed."""
    file = installed_file("engine", "arg_utils.py")
    if file is None:
        return None
    return frozenset(
        line.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters for which vLLM 0.32 makes room (MaxLoRARanks, vllm/config/lora.py)."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads for which vLLM has attention on CPU.

Source: vLLM 0.32, vllm/v1/attention/backends/cpu_attn.py, `get_supported_head_sizes`."""


def against_cpu_heads() -> str:
    """Return why other sizes than `CPU_HEAD_SIZES` are refused."""
    return f"vLLM on CPU has attention only for {', '.join(map(str, CPU_HEAD_SIZES))}"


def _vllm(spec: RunSpec[Any]) -> VllmConfig:
    assert spec.sampling is not None
    return vllm_of(spec.sampling.rollout)


def _settings(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield contradictions between vLLM's settings and other settings."""
    vllm, sampling = _vllm(spec), spec.sampling
    assert sampling is not None
    at, placement = Section("", spec.config), sampling.rollout.placement
    if vllm.takes_adapter_alone:
        for obstacle, instead in _against_separate(spec):
            fix = f"rollout.vllm.adapter: merged, or {instead}"
            yield at.conflict("rollout.vllm.adapter", obstacle, fix, "adapter-separate")
    if vllm.sleeps and placement != "shared":
        why = "Only engines that share the ranks' cards have a reason to sleep; "
        why += f"rollout.placement is {placement}."
        fix = "rollout.vllm.sleep_level: 0, or rollout.placement: shared"
        yield at.conflict("rollout.vllm.sleep_level", why, fix, "sleep-not-shared")
    yield from check_arguments(vllm)


def _against_separate(spec: RunSpec[Any]) -> Iterator[tuple[str, str]]:
    """Yield (reason, remedy) if an adapter cannot be sent to the engines alone."""
    adapter, highest = spec.actor.adapter, _ADAPTER_RANKS[-1]
    if adapter is None:
        yield "The actor trains all its weights: it has no adapter.", "actor.adapter.rank: 16"
    elif adapter.dora:
        yield "vLLM computes no DoRA.", "actor.adapter.dora: false"
    elif adapter.modules_to_save:
        yield "vLLM's LoRA takes no whole modules.", "no actor.adapter.modules_to_save"
    elif adapter.rank > highest:
        yield (
            f"vLLM takes adapters of rank {highest} at most, and actor.adapter.rank is "
            f"{adapter.rank}.",
            f"actor.adapter.rank: {highest}",
        )
    if spec.actor.model.quantization == "nf4":
        yield (
            "The engines would put it over the 16-bit model, and it was trained over 4 bits.",
            "actor.model.quantization: none",
        )
    if _vllm(spec).sleep_level == 2:
        yield (
            "rollout.vllm.sleep_level: 2 drops the engines' weights, and only the adapter would "
            "come back.",
            "rollout.vllm.sleep_level: 1",
        )


def _adapter_room(spec: RunSpec[Any]) -> int | None:
    """Return the highest rank of an adapter for which engines make room beside their model.

    Return None if the adapter is merged, or there is none, or its rank is too high.
    """
    adapter = spec.actor.adapter
    if adapter is None or not _vllm(spec).takes_adapter_alone:
        return None
    return next((rank for rank in _ADAPTER_RANKS if rank >= adapter.rank), None)


def _model(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """Yield the problems of vLLM with heads and layers of the model that `key` gives."""
    vllm, model = _vllm(spec), read_model_json(path)
    heads, size = model.get("num_attention_heads"), head_sizes(path).keys
    if isinstance(heads, int) and heads % vllm.tensor_parallel:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        why = f"It must divide the {heads} attention heads of {path}."
        fix = f"one of {', '.join(divisors)}"
        setting, given = "rollout.vllm.tensor_parallel", str(vllm.tensor_parallel)
        yield conflict(setting, given, why, fix, code="tensor-parallel")
    stages, layers = vllm.pipeline_parallel, model.get("num_hidden_layers")
    if isinstance(layers, int) and stages > layers:
        why = f"Each stage has at least one of the {layers} layers of {path}."
        fix = f"at most {layers}"
        setting = "rollout.vllm.pipeline_parallel"
        yield conflict(setting, str(stages), why, fix, code="pipeline-parallel")
    if spec.cluster.device == "cpu" and size is not None and size not in CPU_HEAD_SIZES:
        why = f"Its attention heads are {size} wide, and {against_cpu_heads()}."
        fix = f"{OTHER_ENGINE}, or a model with other heads"
        yield conflict(key, show(path), why, fix, code="vllm-head-size")


def _files(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield the faults of a draft model's files."""
    if (draft := draft_model(_vllm(spec))) is not None:
        yield from check_model(*draft, tokenizer=False)


def _host(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Yield problems of vLLM with the machine's packages and environment."""
    yield from check_build(spec, host)
    yield from check_labels(spec)
    level = _vllm(spec).sleep_level
    if level > 0 and expands(host.allocator):
        what = f"rollout.vllm.sleep_level: {level}, and the environment has {host.allocator}"
        why = "engines sleep by a memory pool that expandable segments cannot make: vLLM 0.32 "
        why += "turns them off for that pool and on for the rest; older versions may stop with "
        why += "`Expandable segments are not compatible with memory pool`"
        fix = "take expandable_segments:True out of the variable: ranks have it by themselves, and "
        fix += "engines need none"
        yield Problem("sleep-expandable-segments", "warning", what, why, fix)


def _start(spec: RunSpec[Any], device: Device) -> Iterator[Problem]:
    """Refuse engines that are to sleep on the CPU."""
    level = _vllm(spec).sleep_level
    if device == "cpu" and level > 0:
        why = f"This run is on the CPU (cluster.device: {spec.cluster.device}); vLLM can sleep on "
        why += "GPUs only, and would go on without."
        key, fix = "rollout.vllm.sleep_level", "rollout.vllm.sleep_level: 0"
        yield conflict(key, str(level), why, fix, code="sleep-not-shared")


RULES = RolloutRules(
    title="vLLM",
    where=("ray",),
    package="vllm",
    packages=PACKAGES,
    settings=_settings,
    model=_model,
    files=_files,
    tools=find_tools,
    host=_host,
    start=_start,
    adapter_room=_adapter_room,
    install="run `plimsoll setup-vllm`",
    doctor=find_installed,
    compiled=COMPILED,
    shortages=(
        "Free memory on device",
        "No available memory for the cache blocks",
        "requested memory for kv",
        "larger than the available KV cache",
    ),
)
