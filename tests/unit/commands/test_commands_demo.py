"""The demo before it trains: what it writes, and what it is refused for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from plimsoll.commands.demo import prepare, run_demo
from plimsoll.errors import SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.spec.load import load_spec


def test_it_is_on_the_cpu_whatever_the_machine_has(tmp_path: Path) -> None:
    prepare(tmp_path, seed=1)
    assert load_spec(JOBS["sft"], str(tmp_path / "sft.yaml")).cluster.device == "cpu"
    assert load_spec(JOBS["ppo"], str(tmp_path / "ppo.yaml")).cluster.device == "cpu"


def test_the_build_for_gpus_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            return "0.32.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("plimsoll.machine.versions.version", version)
    with pytest.raises(SettingsConflict, match="vllm-build"):
        run_demo(str(tmp_path), seed=1)
    assert not (tmp_path / "sft").exists()
