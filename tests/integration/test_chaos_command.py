"""`plimsoll chaos`: real runs with real faults, which go on until they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import SFT, run_here, write_config, write_task


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chaos")
    write_task(home)
    run = {"directory": "sft", "steps": 4, "save_every": 1, "tensorboard": False}
    write_config(home, "sft", SFT | {"run": run})
    return home


def chaos(home: Path, *words: str) -> tuple[int, str, list[dict[str, Any]]]:
    outcome = run_here(home, "chaos", "sft", "sft.yaml", "--directory", "chaos", *words)
    lines = (home / "chaos" / "chaos.jsonl").read_text().splitlines()
    return outcome.code, outcome.out, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_killed_and_torn_runs_end_like_the_undisturbed_one_and_the_rest_is_done_later(
    home: Path,
) -> None:
    points = "checkpoint.rename,metrics.done,rank.backward"
    common = ("--points", points, "--kinds", "kill,torn", "--seed", "3")
    code, out, rows = chaos(home, *common, "--faults", "1")
    assert code == 0 and len(rows) == 1
    code, out, rows = chaos(home, *common, "--faults", "2")
    assert code == 0 and len(rows) == 2
    assert [row["faults"].split(":")[1] for row in rows] == ["kill", "torn"]
    for row in rows:
        (fired,) = row["fired"]
        assert fired["fault"] == row["faults"] and fired["seconds"] > 0
        assert row["starts"] == 1 and row["left"] == []  # the run went on by itself
        assert set(row["differs"].values()) == {""}
    assert "ended right" in out and out.rstrip().splitlines()[-1].startswith("torn")


@pytest.mark.slow
def test_what_cannot_be_disturbed_is_said(home: Path) -> None:
    words = ("chaos", "sft", "sft.yaml", "--directory", "chaos")
    unreached = run_here(home, *words, "--points", "engine.request", "--kinds", "kill")
    assert unreached.code == 2 and "engine.request" in unreached.err
    unknown = run_here(home, *words, "--kinds", "kill,melt")
    assert unknown.code == 2 and "'melt'" in unknown.err and "torn" in unknown.err
    other = run_here(home, *words, "--run.steps", "2")
    assert other.code == 2 and "`plimsoll sft sft.yaml`" in other.err
    broken = run_here(home, "chaos", "sft", "nowhere.yaml", "--directory", "other")
    assert broken.code == 1 and "plimsoll sft nowhere.yaml" in broken.err
    assert "there is no such config file" in broken.err
    doubled = run_here(home, *words, "--run.directory", "own")
    assert doubled.code == 2 and "--run.directory" in doubled.err
