"""By which kernels the blocks of a model compute on its device: the one place that decides it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from plimsoll.errors import ConfigError
from plimsoll.model import fused
from plimsoll.model.cpu.switch import use_cpu_kernels


def use_kernels(lm: PreTrainedModel, kernels: str, device: torch.device) -> int:
    """Have a model that was just loaded compute by these kernels on its device, in place.

    Args:
        kernels: `model.kernels`, decided.

    Gives what `use_cpu_kernels` gives. Raises ConfigError as `fusions_of`.
    """
    fused.fuse(lm, fusions_of(kernels))
    return use_cpu_kernels(lm, device)


def fusions_of(kernels: str) -> tuple[fused.Fusion, ...]:
    """Return what is fused, by Liger's kernels or by ours.

    Raises ConfigError if it is by Liger's, and liger-kernel cannot be imported.
    """
    if kernels == "own":
        return fused.FUSIONS
    assert kernels == "liger", "of a run that is resolved"
    try:
        from plimsoll.model.liger import FUSIONS
    except ImportError as error:
        raise ConfigError(
            f"liger-kernel cannot be imported: {error}. Norms and MLPs on cards "
            "compute by it. Install it with Triton (`pip install liger-kernel triton`), or "
            "write model.kernels: own for Plimsoll's functions."
        ) from error
    return FUSIONS
