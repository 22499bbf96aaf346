"""The demo before it trains: what it writes, and what it is refused for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from plimsoll.config.jobs import PpoConfig, SftConfig
from plimsoll.config.load import load_config
from plimsoll.errors import SettingsConflict
from plimsoll.recipes.demo import prepare, run_demo


def test_it_is_on_the_cpu_whatever_the_machine_has(tmp_path: Path) -> None:
    prepare(tmp_path, seed=1)
    assert load_config(SftConfig, str(tmp_path / "sft.yaml")).cluster.device == "cpu"
    assert load_config(PpoConfig, str(tmp_path / "ppo.yaml")).cluster.device == "cpu"


def test_the_build_for_gpus_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            return "0.32.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("plimsoll.memory.machine.versions.version", version)
    with pytest.raises(SettingsConflict, match="vllm-build"):
        run_demo(str(tmp_path), seed=1)
    assert not (tmp_path / "sft").exists()
