"""What operators are compiled with at their first use, as `plimsoll doctor` judges it."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.recipes.doctor_finding import Finding

_ADAM = "Adam on the CPU (optimizer_offload)"
_TRITON = "vLLM's kernels (Triton), without which it does not start"
_ZERO_PLUS = "ZeRO++ (quantized_weights, quantized_gradients)"
_ON_CPU = dict.fromkeys(("g++", "ninja", "Python.h"), _ADAM)
_ON_GPU = {"gcc": _TRITON, "Python.h": _TRITON, "g++": _ADAM, "ninja": _ADAM, "nvcc": _ZERO_PLUS}


def compilers(tools: Mapping[str, str | None], gpu: bool) -> Finding:
    """Whether all are there that DeepSpeed and Triton ask for."""
    uses = _ON_GPU if gpu else _ON_CPU
    there = ", ".join(tool for tool in uses if tools[tool]) or "none"
    missing = [tool for tool in uses if not tools[tool]]
    if not missing:
        return Finding("compilers", "ok", there)
    built = " and ".join(dict.fromkeys(uses[tool] for tool in missing))
    why = f"{' and '.join(missing)} missing: {built} cannot be compiled."
    fix = "apt install gcc g++ ninja-build python3-dev"
    fix += "; for nvcc set CUDA_HOME to a CUDA kit" if gpu else ""
    return Finding("compilers", "warn", there, why, fix)
