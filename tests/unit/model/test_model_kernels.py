"""The kernels that a model computes by are those that its config names."""

from __future__ import annotations

import sys

import pytest

from plimsoll.errors import ConfigError
from plimsoll.model import fused, load


def test_ours_are_ours() -> None:
    assert load.fusions_of("own") is fused.FUSIONS


def test_a_liger_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "plimsoll.model.liger", raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.geglu", None)
    with pytest.raises(ConfigError, match=r"liger_kernel.*`pip install liger-kernel\b"):
        load.fusions_of("liger")
