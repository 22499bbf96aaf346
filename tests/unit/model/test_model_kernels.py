"""The choice of kernels for a device."""

from __future__ import annotations

import sys

import pytest
import torch

from plimsoll.errors import ConfigError
from plimsoll.model import fused, kernels

CPU, CARD = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "version"), [(CPU, "0.8.5"), (CPU, None), (CARD, None)], ids=str
)
def test_ours_on_cpus_and_without_liger(
    device: torch.device, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "installed_version", lambda name: version)
    assert kernels.fusions_for(device) is fused.FUSIONS


def test_a_liger_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "installed_version", lambda name: "0.8.5")
    monkeypatch.delitem(sys.modules, "plimsoll.model.liger", raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.geglu", None)
    with pytest.raises(ConfigError, match=r"cannot be imported: .*liger_kernel.* Install it again"):
        kernels.fusions_for(CARD)
