"""Choose by which functions the blocks of a model compute on its device."""

from __future__ import annotations

from plimsoll.errors import ConfigError
from plimsoll.model import fused


def fusions_of(kernels: str) -> tuple[fused.Fusion, ...]:
    """Return the fusions, Liger's or ours; ConfigError if Liger's cannot be imported."""
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
