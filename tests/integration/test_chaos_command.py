"""benchmarks/disturb.py: real runs with real faults, which go on until they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import SFT, write_config, write_task

import disturb


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chaos")
    write_task(home)
    run = {"directory": "sft", "steps": 4, "save_every": 1, "tensorboard": False}
    write_config(home, "sft", SFT | {"run": run})
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


Captured = pytest.CaptureFixture[str]


def chaos(captured: Captured, *words: str) -> tuple[int, str, list[dict[str, Any]]]:
    code = disturb.main(["sft", "sft.yaml", "--directory", "chaos", *words])
    lines = Path("chaos", "chaos.jsonl").read_text().splitlines()
    return code, captured.readouterr().out, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_killed_and_torn_runs_end_like_the_undisturbed_one_and_the_rest_is_done_later(
    capsys: Captured,
) -> None:
    points = "checkpoint.rename,metrics.done,rank.backward"
    common = ("--points", points, "--kinds", "kill,torn", "--seed", "3")
    code, out, rows = chaos(capsys, *common, "--faults", "1")
    assert code == 0 and len(rows) == 1
    code, out, rows = chaos(capsys, *common, "--faults", "2")
    assert code == 0 and len(rows) == 2
    assert [row["faults"].split(":")[1] for row in rows] == ["kill", "torn"]
    for row in rows:
        (fired,) = row["fired"]
        assert fired["fault"] == row["faults"] and fired["seconds"] > 0
        assert row["starts"] == 1 and row["left"] == []  # the run went on by itself
        assert set(row["differs"].values()) == {""}
    assert "ended right" in out and out.rstrip().splitlines()[-1].startswith("torn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sft sft.yaml --points engine.request --kinds kill", "engine.request"),
        ("sft sft.yaml --kinds kill,melt", "'melt'"),
        ("sft sft.yaml --run.steps 2", "`plimsoll sft sft.yaml`"),
        ("sft nowhere.yaml --directory other", "there is no such config file"),
        ("sft sft.yaml --run.directory own", "--run.directory"),
    ],
)
def test_what_cannot_be_disturbed_is_said(words: str, said: str, capsys: Captured) -> None:
    given = [] if "--directory" in words else ["--directory", "chaos"]
    assert disturb.main([*words.split(), *given]) == 2
    assert said in capsys.readouterr().err
