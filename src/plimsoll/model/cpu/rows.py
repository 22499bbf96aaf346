"""Numbers of rows that come again, for the CPU's matrix products.

oneDNN, which computes bfloat16 products on CPUs, compiles a kernel for every new shape: 3 to 15 ms
each, as long as several products of a small model (docs/performance.md). Hardly two packs are of
one size, so their rows are filled with zeros up to a multiple; what those rows give is cut off.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

OF_PACKS = 64
"""Tokens of a pack, and learned ones, are a multiple of it."""
OF_SEQUENCES = 32
"""Queries and keys of a sequence."""


def up(rows: int, multiple: int) -> int:
    """The next multiple."""
    return -(-rows // multiple) * multiple


def filled(x_N: Tensor) -> Tensor:
    """A pack's rows, of shape [N] or [N, H], and zeros up to the multiple; on an accelerator, whose
    kernels take any number, as they are."""
    more = up(len(x_N), OF_PACKS) - len(x_N) if x_N.is_cpu else 0
    return pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, more)) if more else x_N
