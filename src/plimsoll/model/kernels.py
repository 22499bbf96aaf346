"""Choose by which functions the blocks of a model compute on its device."""

from __future__ import annotations

import torch

from plimsoll.errors import ConfigError
from plimsoll.machine.versions import LIGER, installed_version
from plimsoll.model import fused
from plimsoll.model.price.form import fused_by


def fusions_for(device: torch.device) -> tuple[fused.Fusion, ...]:
    """Return the fusions for a device, by Liger's kernels or by ours.

    `plimsoll plan` and `plimsoll doctor` warn of cards without liger-kernel.

    Raises:
        ConfigError: liger-kernel is installed and cannot be imported.
    """
    has_card = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if has_card else None
    if fused_by(device.type, capability, installed_version(LIGER) is not None) == "own":
        return fused.FUSIONS
    try:
        from plimsoll.model.liger import FUSIONS
    except ImportError as error:
        raise ConfigError(
            f"liger-kernel is installed and cannot be imported: {error}. Norms and MLPs on cards "
            "use it. Install it again with Triton (`pip install liger-kernel triton`), or "
            "uninstall it: Plimsoll's own functions then take its place."
        ) from error
    return FUSIONS
