"""Runs whose disk is full: the last checkpoint stays, and the run ends with what is missing."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import SFT, cut_off, metrics, run_here, write_config, write_task

from plimsoll.commands.planning import plan_run, summarize_plan
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec
from plimsoll.run.files import directory_bytes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("full")
    write_task(home)
    run = {"directory": "whole", "steps": 4, "save_every": 2, "keep_checkpoints": 2}
    write_config(home, "sft", SFT | {"run": run | {"tensorboard": False}})
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    assert run_here(home, "sft", "sft.yaml").code == 0
    return home / "whole"


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """A disk of 64 MiB; only root may mount one."""
    path = home / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Have the system refuse to let a file grow beyond a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_goes_on(home: Path, run: Path, whole: Path, words: tuple[str, ...]) -> None:
    """Once there is room, the run is the undisturbed one."""
    assert checkpoints(run) == ["step-000002"]
    assert json.loads((run / "end.json").read_text())["how"] == "failed"
    again = run_here(home, *words, "--run.resume", "auto")
    assert again.code == 0 and "resumed after step 2" in again.out, again.err
    assert checkpoints(run) == ["step-000002", "step-000004"]
    assert metrics(run) == metrics(whole)
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (run, whole)]
    assert weights[0] == weights[1]


def test_the_price_of_the_first_checkpoint_is_its_tensors(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    spec = load_spec(JOBS["sft"], "sft.yaml", [])
    price = summarize_plan(spec, plan_run(spec)).checkpoint_bytes
    found = directory_bytes(whole / "checkpoints" / "step-000004")
    assert price <= found < price + 64 * 2**10  # names, shapes and checksums


def test_a_disk_without_room_is_seen_before_the_save(
    home: Path, whole: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    words = ("sft", "sft.yaml", "--run.directory", str(run))
    cut_off(whole, run, 2)
    size = directory_bytes(run / "checkpoints" / "step-000002")
    taken = 64 * 2**20 - directory_bytes(run) - 3 * size // 4
    (small_disk / "others").write_bytes(b"x" * taken)
    full = run_here(home, *words, "--run.resume", "auto", "--force")  # the plan sees it, too
    assert full.code == 1
    assert f"The disk of {run} has no room for the next checkpoint" in full.err
    assert "are missing" in full.err and "step-000002" in full.err and "Traceback" not in full.err
    (small_disk / "others").unlink()
    assert_goes_on(home, run, whole, words)


def test_a_disk_that_fills_up_amid_a_save_keeps_the_last_checkpoint(
    home: Path, whole: Path
) -> None:
    words = ("sft", "sft.yaml", "--run.directory", "torn")
    cut_off(whole, home / "torn", 2)
    largest = max(
        file.stat().st_size for file in (home / "torn").rglob("*.safetensors") if file.is_file()
    )
    with files_of_at_most(largest // 2):
        full = run_here(home, *words, "--run.resume", "auto")
    assert full.code == 1
    assert "Cannot write" in full.err and "Free disk space" in full.err
    assert "Traceback" not in full.err and not list((home / "torn" / "checkpoints").glob(".*"))
    assert_goes_on(home, home / "torn", whole, words)
