"""The DPO example: what prepare_pairs.py makes of dialogues."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_pairs
from plimsoll.data.template import make_template
from plimsoll.model.load import load_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "dpo"
SMALL = ["--vocabulary", "300", "--hidden", "16", "--layers", "1"]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("prepare_pairs")


def dialogue(question: int, answer: str) -> str:
    return f"\n\nHuman: What is {question}?\n\nAssistant: {answer}"


def write_copy(directory: Path, count: int) -> Path:
    """Two pairs for each question, and a row whose chosen answer is empty."""
    rows = [
        {"chosen": dialogue(i, f"{i}."), "rejected": dialogue(i, f"No {word}.")}
        for i in range(count)
        for word in ("idea", "way")
    ]
    rows.append({"chosen": dialogue(0, ""), "rejected": dialogue(0, "a")})
    file = directory / "harmless.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return file


def test_dialogues_become_prompts_with_two_answers(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_copy(tmp_path, 20), tmp_path / "out"
    assert prepare.main(["--data", str(data), "--out", str(out), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "34 pairs to learn from, 6 to test on" in printed
    assert f"\nleft out: {data}:41: chosen: is empty" in printed
    rows = {
        split: [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    prompts = {split: {row["prompt"] for row in found} for split, found in rows.items()}
    assert len(rows["train"]) == 34 and len(prompts["train"]) == 17
    assert not prompts["train"] & prompts["test"]
    for row in rows["test"]:
        number = row["prompt"].removeprefix("\n\nHuman: What is ").removesuffix("?\n\nAssistant:")
        assert row["chosen"] == f" {number}." and row["rejected"].startswith(" No ")


def test_the_rows_are_pairs_for_the_example_model(prepare: ModuleType, tmp_path: Path) -> None:
    data, out = write_copy(tmp_path, 10), tmp_path / "out"
    assert prepare.main(["--data", str(data), "--out", str(out), *SMALL]) == 0
    tokenizer = load_tokenizer(str(out / "model"))
    template = make_template(tokenizer, "none", None)
    own = SourceConfig(
        path=str(out / "test.jsonl"), prompt="prompt", chosen="chosen", rejected="rejected"
    )
    pairs = load_pairs(DataConfig(train=own), own, template).items
    assert len(pairs) == 4
    text = tokenizer.decode(pairs[0].chosen.tokens[pairs[0].chosen.loss_mask])
    assert text == json.loads((out / "test.jsonl").open().readline())["chosen"] + str(
        tokenizer.eos_token
    )


def test_another_seed_is_another_split(prepare: ModuleType, tmp_path: Path) -> None:
    pairs, _ = prepare.read_pairs(str(write_copy(tmp_path, 20)))
    one, again, other = (prepare.split(pairs, 0.3, seed) for seed in (0, 0, 1))
    assert one == again and one != other


@pytest.mark.parametrize("option", [("--test", "0"), ("--test", "1"), ("--vocabulary", "256")])
def test_options_that_cannot_be_are_refused(
    prepare: ModuleType, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--data", "x", "--out", "y", *option])
    assert ended.value.code == 2
    assert " ".join(option) in capsys.readouterr().err


def test_a_file_that_is_not_there(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(["--data", str(tmp_path / "x.jsonl.gz"), "--out", str(tmp_path)]) == 2
    assert "x.jsonl.gz" in capsys.readouterr().err
