"""For all tests: what one leaves in the process, or on the machine, is not to change another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Other work may share the cores, so hypothesis measures no time.
settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")


@pytest.fixture(autouse=True, scope="module")
def _torchs_own_linear() -> Iterator[None]:
    """A ZeRO-3 engine leaves a linear of DeepSpeed's in torch, which saves other tensors."""
    yield
    if torch := sys.modules.get("torch"):
        torch.nn.functional.linear = torch._C._nn.linear
