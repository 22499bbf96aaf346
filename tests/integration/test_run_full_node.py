"""A node that has hardly any memory left: the run saves after the step, stops, and can go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SFT, metrics, run_here, write_config, write_task

from plimsoll.machine import processes
from plimsoll.machine.host import HostMemory, live_host


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_task(tmp_path)
    run = {"directory": "run", "steps": 3, "tensorboard": False}
    write_config(tmp_path, "sft", SFT | {"run": run})
    return tmp_path


def test_the_run_saves_and_stops_before_the_kernel_kills(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filling_up() -> HostMemory:
        rows = home / "run" / "metrics.jsonl"
        free = 10**8 if rows.is_file() and rows.read_text() else 10**10
        return HostMemory(10**11, 10**11, free)

    monkeypatch.setattr(processes, "live_host", filling_up)
    stopped = run_here(home, "sft", "sft.yaml")
    assert stopped.code == 1 and "stopping after this step: " in stopped.out
    assert "stopped after step 2, before the kernel" in stopped.err
    assert "100 MB of 100 GB host memory left" in stopped.err
    assert "step-000002" in stopped.err and "--run.resume auto" in stopped.err
    monkeypatch.setattr(processes, "live_host", live_host)
    rest = run_here(home, "sft", "sft.yaml", "--run.resume", "auto")
    assert rest.code == 0 and "resumed after step 2" in rest.out, rest.err
    assert [row["step"] for row in metrics(home / "run")] == [1, 2, 3]


def test_a_node_that_is_full_after_loading_ends_the_run_before_its_first_step(home: Path) -> None:
    stopped = run_here(home, "sft", "sft.yaml", "--cluster.least_free_memory", "1.0")
    assert stopped.code == 1
    assert "stopped before the first step" in stopped.err
    assert not (home / "run" / "checkpoints").exists()
