"""The example of SmolLM2: its rows, its configs, and what prepare.py refuses and leaves out."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from plimsoll.jobs.which import load_any

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
PROBLEM = {"question": "Half of 2,400?", "answer": "It is 2400/2=<<2400/2=1200>>1200.\n#### 1,200"}


def write_sources(home: Path) -> list[str]:
    """Write a problem in each split of GSM8K, and pairs of HH-RLHF of which two are left out."""
    for split in ("train", "test"):
        (home / f"{split}.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    pairs = [(f"Is it {i}?", "Yes.", "No.") for i in range(20) for _ in range(2)]
    pairs += [("Is it long?", "Yes." * 100, "No."), ("Is it empty?", "", "No.")]
    rows = [
        {name: f"\n\nHuman: {question}\n\nAssistant: {answer}" for name, answer in answers.items()}
        for question, chosen, rejected in pairs
        for answers in [{"chosen": chosen, "rejected": rejected}]
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (home / "pairs.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return ["--gsm8k", str(home), "--pairs", str(home / "pairs.jsonl.gz")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file, from a folder in which every config finds its data."""
    home = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
        assert main(["--out", "runs/smollm2", *write_sources(home)]) == 0
        for config in sorted(EXAMPLE.glob("*.yaml")):
            for source in load_any(str(config), ()).data.sources().values():
                assert Path(source.path).exists(), config
    return {
        f"{path.parent.name}/{path.stem}": list(map(json.loads, path.read_text().splitlines()))
        for path in home.glob("runs/smollm2/*/*.jsonl")
    }


def test_sums_are_right_and_none_is_on_both_sides(rows: dict[str, list[dict[str, Any]]]) -> None:
    questions = {
        split: {row["question"] for row in rows[f"sums/{split}"]} for split in ("train", "test")
    }
    assert len(questions["train"]) == 700 and len(questions["test"]) == 200
    assert not questions["train"] & questions["test"]
    for row in rows["sums/test"]:
        a, b = row["question"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(row["answer"])


def test_problems_lose_their_calculator_marks(rows: dict[str, list[dict[str, Any]]]) -> None:
    expected = {
        "question": "Half of 2,400?",
        "response": "It is 2400/2=1200.\n#### 1,200",
        "answer": "1200",
    }
    assert rows["gsm8k/train"] == rows["gsm8k/test"] == [expected]


def test_pairs_of_a_prompt_stay_together(rows: dict[str, list[dict[str, Any]]]) -> None:
    train, test = rows["pairs/train"], rows["pairs/test"]
    assert (len(train), len(test)) == (32, 8)
    prompts = [{row["prompt"][0]["content"] for row in split} for split in (train, test)]
    assert not prompts[0] & prompts[1] and "Is it long?" not in prompts[0] | prompts[1]


def test_a_row_that_is_no_problem_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(PROBLEM | {"answer": "1200"}) + "\n")
    main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
    assert main(["--out", str(tmp_path / "out"), "--gsm8k", str(tmp_path)]) != 0
    assert "train.jsonl:1" in capsys.readouterr().err
