"""The GSM8K example: what prepare.py makes of rows, and what ppo.yaml calls well-formed."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from plimsoll.jobs import JOBS
from plimsoll.model.load import load_tokenizer
from plimsoll.model.tiny import train_tokenizer
from plimsoll.records import Prompt, single_turn
from plimsoll.resolve.load import load_spec
from plimsoll.reward.score import open_rewards

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"
ROW = {
    "question": "A farm has 1,200 hens and sells 3/4. How many sold?",
    "answer": "It sells 1200*3/4 = <<1200*3/4=900>>900 hens.\nSo 900.\n#### 1,900",
}
SMALL = ["--vocabulary", "300", "--hidden", "16", "--layers", "1"]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("prepare")


def write_copy(directory: Path, *rows: dict[str, Any] | str) -> Path:
    """A copy of GSM8K with these rows in both splits; a text stands as it is."""
    directory.mkdir()
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def scored(response: str, reference: str = "1900") -> dict[str, float]:
    """The reward parts of ppo.yaml for a response."""
    config = load_spec(JOBS["ppo"], str(EXAMPLE / "ppo.yaml")).config
    nothing = np.zeros(0, dtype=np.int64)
    prompt = Prompt(0, nothing, "", reference)
    logprobs = np.zeros(0, dtype=np.float32)
    trajectory = single_turn(prompt, 0, nothing, logprobs, response, "stop", 0)
    with open_rewards(config.rewards) as scorer:
        (scored,) = scorer([trajectory])
    return {part.name: part.value for part in scored.rewards}


def test_rows_become_prompt_response_and_plain_number(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_copy(tmp_path / "data", ROW, ROW), tmp_path / "out"
    assert prepare.main(["--data", str(data), "--out", str(out), *SMALL]) == 0
    assert re.search(r"2 train, 2 test .* 300\b", capsys.readouterr().out)
    question = "Question: A farm has 1,200 hens and sells 3/4. How many sold?\nAnswer:"
    response = " It sells 1200*3/4 = 900 hens.\nSo 900.\n#### 1900\n"
    row = {"question": question, "response": response, "answer": "1900"}
    for split in ("train", "test"):
        lines = (out / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [row] * 2


def test_the_tokenizer_that_is_loaded_is_the_one_that_was_trained(
    prepare: ModuleType, tmp_path: Path
) -> None:
    data, out = write_copy(tmp_path / "data", ROW), tmp_path / "out"
    assert prepare.main(["--data", str(data), "--out", str(out), *SMALL]) == 0
    text = " It sells 900 hens.\n#### 1900\n"
    [problem] = prepare.read_split(str(data), "train")
    trained = train_tokenizer([problem.question, problem.response], 300)
    loaded = load_tokenizer(str(out / "model"))
    tokens = loaded(text)["input_ids"]
    assert tokens == trained(text)["input_ids"]
    assert len(tokens) < len(text.encode())  # it has learned merges
    assert loaded.decode(tokens, skip_special_tokens=True) == text
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["eos_token_id"] == loaded.eos_token_id is not None
    assert config["vocab_size"] == len(loaded) == 300


def test_the_default_model_has_27_million_parameters(prepare: ModuleType, tmp_path: Path) -> None:
    data, out = write_copy(tmp_path / "data", ROW), tmp_path / "out"
    assert prepare.main(["--data", str(data), "--out", str(out)]) == 0
    # Embedding 8192 * 512; a layer has q, o 512 * 512, k, v 512 * 256, biases 512 + 2 * 256, a
    # feed-forward of 3 * 512 * 1408 and 2 norms of 512; one norm at the end.
    layer = 2 * 512 * 512 + 2 * 512 * 256 + 1024 + 3 * 512 * 1408 + 1024
    header = (out / "model" / "model.safetensors").read_bytes()
    sizes = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    counted = sum(int(np.prod(v["shape"])) for k, v in sizes.items() if k != "__metadata__")
    assert counted == 8192 * 512 + 8 * layer + 512 == 27_804_160


def test_missing_data_names_the_option_and_the_files(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = prepare.main(["--data", str(tmp_path / "gone"), "--out", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert code == 2
    assert f"--data {tmp_path / 'gone'}" in message
    assert "train.jsonl and test.jsonl" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "How many?"}, "train.jsonl:2: answer:"),
        ({"question": " ", "answer": "1\n#### 1"}, "train.jsonl:2: question:"),
        ({"question": "How many?", "answer": "It is 1."}, "train.jsonl:2: answer:"),
        ("{not json", "train.jsonl:2:"),
    ],
)
def test_a_row_that_is_not_gsm8ks_is_named(
    prepare: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any] | str,
    named: str,
) -> None:
    data = write_copy(tmp_path / "data", ROW, row)
    assert prepare.main(["--data", str(data), "--out", str(tmp_path / "out"), *SMALL]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--hidden", "20"), ("--vocabulary", "256"), ("--layers", "0")])
def test_a_model_that_cannot_be_is_refused(
    prepare: ModuleType, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--data", "x", "--out", "y", *option])
    assert ended.value.code == 2
    assert " ".join(option) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "well_formed", "right"),
    [
        ("So 900.\n#### 1900\n", 1, 1),
        ("So 900.\n#### 900\n", 1, 0),
        ("#### -3.5\n", 1, 0),
        ("#### 1900", 0, 1),  # cut before the line came to its end
        ("#### 1900 hens\n", 0, 1),
        ("#### \n", 0, 0),
        ("#### 1900\nSo 900.\n", 0, 1),  # not the last line
        ("#### 1900\n\n", 0, 1),
        ("So 1900.\n", 0, 0),
    ],
)
def test_what_ppo_calls_right_and_well_formed(
    prepare: ModuleType, ending: str, well_formed: float, right: float
) -> None:
    made = prepare.worked_answer(ROW["answer"])
    assert scored(made) == {"right": 1, "well_formed": 1}
    assert scored(f" It sells 900.\n{ending}") == {"right": right, "well_formed": well_formed}
