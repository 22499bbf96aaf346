"""A run with two sets of held-out prompts, in this process: its figures by set and by source, its
best checkpoint by one of them, and `plimsoll eval` on both sets."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
from commands import PPO, Outcome, metrics, run_here, write_config, write_task

from plimsoll.reward.math_answer import answer
from plimsoll.run.state import RunState

KINDS = ("small", "large")
BEST = "eval/hard/large/pass@2"
SETS: dict[str, Any] = {
    "easy": {"path": "held_out.jsonl", "prompt": "prompt", "reference": "answer", "responses": 5},
    "hard": {
        "path": "kinds.jsonl",
        "prompt": "prompt",
        "reference": "answer",
        "source": "kind",
        "responses": 2,
        "sampling": {"max_new_tokens": 4, "temperature": 0.8},
        "pass_by": "digits",
    },
}
CONFIG: dict[str, Any] = {
    **{key: value for key, value in PPO.items() if key not in ("critic", "algorithm")},
    "run": {
        "directory": "sets",
        "steps": 3,
        "eval_every": 1,
        "best": {"metric": BEST, "goal": "highest"},
        "tensorboard": False,
    },
    "data": PPO["data"] | {"eval": SETS},
    "rewards": {
        "right": {"name": "math_answer"},
        "digits": {"name": "pattern", "options": {"pattern": r"\d\D*\d"}, "weight": 0.1},
    },
    "eval_sampling": {"max_new_tokens": 6},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sets")
    write_task(home)
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "kind": KINDS[a > 3]} for a in range(8)]
    (home / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_config(home, "grpo", CONFIG)
    return home


@pytest.fixture(scope="module")
def ended(home: Path) -> Outcome:
    return run_here(home, "grpo", "grpo.yaml")


def test_every_set_and_source_has_its_figures(home: Path, ended: Outcome) -> None:
    assert ended.code == 0, ended.err
    rows = metrics(home / "sets")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    sets = [f"easy/{name}" for name in ("pass@1", "pass@2", "pass@4", "pass@5", "maj@5")]
    sources = [f"hard/{kind}/{name}" for kind in KINDS for name in ("right", "pass@1", "pass@2")]
    for row in rows:
        assert {f"eval/{name}" for name in (*sets, *sources, "reward", "hard/digits")} <= row.keys()
        assert "eval/hard/maj@2" not in row  # a pattern takes no answers
        both = [row["eval/easy/reward"], row["eval/hard/reward"]]
        assert row["eval/reward"] == pytest.approx(fmean(both))
        by_source = [row[f"eval/hard/{kind}/pass@2"] for kind in KINDS]  # of four prompts each
        assert row["eval/hard/pass@2"] == pytest.approx(fmean(by_source))
        assert row["eval/hard/digits"] == pytest.approx(row["eval/hard/pass@1"])


def test_the_best_checkpoint_is_that_of_one_sources_figure(home: Path, ended: Outcome) -> None:
    assert ended.code == 0, ended.err
    values = [row[BEST] for row in metrics(home / "sets")][1:]
    state = RunState.load(home / "sets" / "checkpoints" / "step-000003" / "state.json")
    assert (state.best, state.best_step) == (max(values), 1 + values.index(max(values)))
    assert f"the model is that of step {state.best_step}: {BEST}" in ended.out


def test_a_source_that_no_row_names_is_refused_with_the_nearest(home: Path) -> None:
    flags = ["--run.directory", "other", "--run.best.metric", "eval/hard/lagre/pass@2"]
    told = run_here(home, "grpo", "grpo.yaml", *flags)
    assert told.code == 2
    assert re.search(r"data\.eval\.hard .*'lagre'", told.err)
    assert re.search(r"'large'\? .*: large, small\.", told.err)


def test_a_model_is_measured_on_all_sets(home: Path, ended: Outcome) -> None:
    """Each figure is as it is worked out from the answers that are kept."""
    assert ended.code == 0, ended.err
    measured = run_here(home, "eval", "sets", "--out", "measured")
    assert measured.code == 0, measured.err
    found = json.loads((home / "measured" / "eval.json").read_text())
    kept = pq.read_table(home / "measured" / "eval-answers.parquet").to_pylist()
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in kept:
        groups.setdefault(row["group"], []).append(row)
    assert [len(own) for own in groups.values()] == [5] * 4 + [2] * 8 and found["rows"] == 12
    easy, hard = [own for own in groups.values() if len(own) == 5], [*groups.values()][4:]
    assert {own[0]["source"] for own in hard} == set(KINDS)
    assert all(len(row["tokens"]) <= 4 for own in hard for row in own)
    for k in (1, 2, 4, 5):
        assert found[f"easy/pass@{k}"] == pytest.approx(passing(easy, "reward_right", k))
    large = [own for own in hard if own[0]["source"] == "large"]
    assert found["hard/large/pass@2"] == pytest.approx(passing(large, "reward_digits", 2))
    assert found["easy/maj@5"] == pytest.approx(fmean(map(most_are_right, easy)))


def passing(groups: list[list[dict[str, Any]]], part: str, k: int) -> float:
    """The mean share of k of the responses to a prompt in which one has the full reward."""
    return fmean(
        fmean(any(row[part] == 1 for row in rows) for rows in combinations(own, k))
        for own in groups
    )


def most_are_right(own: list[dict[str, Any]]) -> bool:
    votes = Counter(filter(None, (answer(row["response"]) for row in own)))
    if not votes:
        return False
    first = next(row for row in own if answer(row["response"]) == votes.most_common(1)[0][0])
    return bool(first["reward_right"] == 1)
