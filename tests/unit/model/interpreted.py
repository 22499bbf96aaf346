"""Liger's kernels without a card, by Triton's interpreter, which lacks parts of the compiler."""

from __future__ import annotations

import importlib.util
import os

import torch

HAS_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not() -> str:
    """Return why Liger's kernels cannot run here; "" if they can."""
    missing = [
        name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"needs {' and '.join(missing)}"
    if not (HAS_CARD or _INTERPRETED):
        return "needs a CUDA GPU, or TRITON_INTERPRET=1"
    return ""


def complete_interpreter() -> None:
    """Give kernels that Triton interprets what its compiler gives them: numbers as tensors, and
    CUDA's reciprocal root and tanh."""
    if not _INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def as_tensor(argument: object) -> object:
        if not isinstance(argument, float):
            return convert(argument)
        number = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(number, tl.float32)

    interpreter._implicit_cvt = as_tensor
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
