"""The calculator example: its rows, its configs, and that a demonstration is what the tool does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from plimsoll.jobs.which import load_any

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"


def test_it_prepares_what_its_configs_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
    assert main(["--out", "runs/calculator"]) == 0
    for config in sorted(EXAMPLE.glob("*.yaml")):
        spec = load_any(str(config), ())
        for source in spec.data.sources().values():
            assert Path(source.path).exists(), config
    rows = list(map(json.loads, Path("runs/calculator/sft.jsonl").read_text().splitlines()))
    problems = map(json.loads, Path("runs/calculator/train.jsonl").read_text().splitlines())
    answers = [problem["answer"] for problem in problems]
    assert len(rows) == len(answers) == 4000
    right = sum(
        row["messages"][-1]["content"] == f"#### {answer}"
        for row, answer in zip(rows, answers, strict=True)
    )
    called = sum(len(row["messages"]) == 4 for row in rows)
    assert 0.35 < right / 4000 < 0.45 and 0.75 < called / 4000 < 0.85
