"""Trying the rewards of a config on its first rows: the table, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plimsoll.cli import main
from plimsoll.records import Prompt, RewardPart, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import write_trajectories

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
MINE = """
def given(completions, answer=None, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer)]

def blind(completions, **kwargs):
    return [0.0] * len(completions)

def needs(completions, solution):
    return [1.0] * len(completions)

def breaks(completions, **kwargs):
    raise KeyError("gone")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "grpo.yaml").write_text(
        "# grpo\nrun: {directory: run, steps: 1}\ncluster: {where: local}\n"
        "data: {train: {path: rows.jsonl, prompt: question, reference: answer}}\n"
        "actor: {model: {path: gone}}\nbatch: {prompts: 2, responses: 2}\n"
        "rollout: {transformers: {}, sampling: {max_new_tokens: 8}}\n"
        "rewards: {right: {name: math_answer}, mine: {name: 'mine.py:given', weight: 0.5}}\n"
    )
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["try-reward", "grpo.yaml", *flags])
    return code, *capsys.readouterr()


def test_each_row_gets_its_reference_anothers_and_no_text(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is there, and none is needed."""
    code, out, _ = run(capsys, "--rows", "2")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and "note" not in out
    assert lines[2:] == [
        ["row", "response", "right", "mine"],
        ["0", "reference:", "1", "1", "1"],
        ["0", "another", "row's:", "2", "0", "0"],
        ["0", "empty", "0", "0"],
        ["1", "reference:", "2", "1", "1"],
        ["1", "another", "row's:", "1", "0", "0"],
        ["1", "empty", "0", "0"],
    ]


def test_a_reward_that_tells_nothing_apart_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--rewards.mine.name", "mine.py:blind")
    assert code == 0 and "the same value, 0" in out


def test_a_reward_that_fails_is_shown_beside_those_that_do_not(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, "--rewards.mine.name", "mine.py:breaks", "--rows", "1")
    assert code == 1 and "failed" in out and "KeyError" in error
    assert "  1  failed" in out  # math_answer's


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rewards.mine.name", "mine.py:needs"], "takes 'solution'"),
        (["--data.train.reference=null", "--rewards.mine.name=mine.py:blind"], "no column of ref"),
        (["--data.train.reference", "answers"], "no column `answers`"),
        (["--rows", "0"], "at least 1 row"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    code, _, error = run(capsys, *flags)
    assert code == 2 and said in error


def write_step(home: Path, *texts: str) -> None:
    """Write a step whose responses to row 0 got a reward `right` of 0.5, and one that is gone."""
    path = RunDirectory(home / "earlier").trajectories_path(3)
    path.parent.mkdir(parents=True)
    (home / "earlier" / "metrics.jsonl").write_text("")
    named = {"answer": "1", "question": "0+1?"}
    prompt = Prompt(0, np.array([1, 2], np.int32), "0+1?", "1", named=named, is_text=True)
    parts = (RewardPart("gone", 2.0, 0.1), RewardPart("right", 0.5))
    tokens, logprobs = np.array([3], np.int64), np.zeros(1, np.float32)
    rows = [
        single_turn(prompt, i, tokens, logprobs, text, "stop", 0, parts, group=5)
        for i, text in enumerate(texts)
    ]
    write_trajectories(path, 3, rows)


def test_a_step_is_scored_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function gets the row's columns by their names; a part that is gone no longer counts."""
    write_step(home, "1", "2")
    code, out, _ = run(capsys, "--run", "earlier", "--rows", "2")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines == [
        ["step", "3", "of", "earlier:", "2", "responses"],
        [],
        ["reward", "of", "the", "run", "now", "changed"],
        ["gone", "2", "-", "-"],
        ["right", "0.5", "0.5", "2", "of", "2"],
        ["mine", "-", "0.5", "-"],
        ["in", "all", "0.7", "0.75", "2", "of", "2"],
        [],
        ["response", "of", "the", "run", "now"],
        ["5.0", "0.7", "1.5", "1"],
        ["5.1", "0.7", "0", "2"],
        [],
        ["note:", "the", "run's", "reward", "gone", "is", "not", "in", "this", "config"],
    ]


def test_a_step_that_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(home, "1")
    code, _, error = run(capsys, "--run", "earlier", "--step", "2")
    assert code == 2 and "no trajectories of step 2" in error
    assert run(capsys, "--step", "2")[0] == 2
