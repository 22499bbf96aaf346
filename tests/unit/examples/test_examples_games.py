"""The guessing game and the self-correction: their rows, their configs, and who taught what."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.jobs.which import load_any

EXAMPLES = Path(__file__).parents[3] / "examples"
Rows = Callable[[str], list[dict[str, Any]]]


def script(path: str) -> SimpleNamespace:
    """Return what a file of the examples has."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / path)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("games")
    for name in ("guessing_game", "self_correction"):
        assert script(f"{name}/prepare.py").main(["--out", str(home / "runs" / name)]) == 0
    return home


@pytest.fixture
def rows(home: Path) -> Rows:
    return lambda name: [*map(json.loads, (home / "runs" / name).read_text().splitlines())]


@pytest.mark.parametrize("name", ["guessing_game", "self_correction"])
def test_a_config_reads_what_was_prepared_and_no_held_out_prompt_is_trained_on(
    home: Path, rows: Rows, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    for config in sorted((EXAMPLES / name).glob("*.yaml")):
        for source in load_any(str(config), ()).data.sources().values():
            assert Path(source.path).exists(), config
    train, test = (rows(f"{name}/{split}.jsonl") for split in ("train", "test"))
    asked = next(iter(train[0]))
    trained = {row[asked] for row in train}
    trained |= {row["messages"][0]["content"] for row in rows(f"{name}/sft.jsonl")}
    assert test and not trained & {row[asked] for row in test}


def test_the_heedful_guess_among_the_numbers_that_are_left(rows: Rows) -> None:
    """Some of the other guessers do so by chance."""
    prepare = script("guessing_game/prepare.py")
    heedful = 0
    for row in rows("guessing_game/sft.jsonl"):
        _, *messages = row["messages"]
        low, high, heeds = prepare.LOW, prepare.HIGH, True
        for guess, answer in zip(messages[::2], [*messages[1::2], None], strict=True):
            number = int(guess["content"])
            assert prepare.LOW <= number <= prepare.HIGH
            heeds &= low <= number <= high
            if answer is not None:
                up = f"higher than {number}." in answer["content"]
                low, high = (max(low, number + 1), high) if up else (low, min(high, number - 1))
        assert len(messages) <= 2 * prepare.GUESSES - 1
        heedful += heeds
    assert 2000 - 160 < heedful < 4000 - 160  # half of 4,000; five standard deviations are 158


def test_second_answers_follow_what_the_environment_said(rows: Rows) -> None:
    right = {"first": 0, "second": 0}
    for row in rows("self_correction/sft.jsonl"):
        problem, first, told, second = (message["content"] for message in row["messages"])
        answer = str(sum(map(int, problem.rstrip("=").split("+"))))
        was, now = (text.rpartition("#### ")[2] == answer for text in (first, second))
        assert told.startswith(f"Your answer is {'right' if was else 'wrong'}.")
        assert now or not was
        right["first"] += was
        right["second"] += now
    assert right["first"] == pytest.approx(700, abs=120)  # 0.2 of 3,500; five standard deviations
    assert right["second"] == pytest.approx(1540, abs=150)  # these, and 0.3 of the others
