"""Held-out rows that are learned from, too, with real files and a real session of each job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.data.dataset import (
    load_pairs,
    load_responses,
    load_samples,
    load_scored_pairs,
    load_steps,
)
from plimsoll.jobs.distill import DistillConfig
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.kto import KtoConfig
from plimsoll.jobs.prm import PrmConfig
from plimsoll.jobs.rm import RmConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.rl.setup import prompt_loader
from plimsoll.run.readings import Planned
from plimsoll.train.run_data import LoadRows, load_data
from plimsoll.train.session import open_session

ROWS = [
    {"q": f"{i}+1=", "a": f" {i + 1}", "b": f" {i}", "s": [f" {i}", f" {i + 1}"], "l": [0, 1]}
    for i in range(8)
]
MODEL = {"model": {"path": "model"}}
SAMPLES, PAIRS = {"prompt": "q", "response": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}
JOBS: dict[str, tuple[type[JobConfig], LoadRows[Any] | None, dict[str, Any], dict[str, Any]]] = {
    "sft": (SftConfig, load_samples, SAMPLES, {}),
    "distill": (DistillConfig, load_samples, SAMPLES, {"teacher": MODEL}),
    "dpo": (DpoConfig, load_pairs, PAIRS, {}),
    "rm": (RmConfig, load_scored_pairs, PAIRS, {}),
    "kto": (KtoConfig, load_responses, {**SAMPLES, "label": "good"}, {}),
    "prm": (PrmConfig, load_steps, {"prompt": "q", "steps": "s", "labels": "l"}, {}),
    "ppo": (
        RlConfig,
        None,
        {"prompt": "q", "reference": "a"},
        {"critic": MODEL, "rewards": {"r": {"name": "exact_match"}}},
    ),
}
"""By job: its config, how it reads rows (PPO by its config), its columns, what else it needs."""


@pytest.fixture(autouse=True)
def home(model_home: Path) -> Path:
    """Write rows to learn from in two files, which share none, some or all of the held-out ones."""
    write("first", [row | {"good": True} for row in ROWS[:3]])
    write("second", [row | {"good": True} for row in ROWS[3:6]])
    write("other", [row | {"good": True} for row in ROWS[6:]])
    write("some", [row | {"good": False, "more": 1} for row in (*ROWS[6:], ROWS[2], ROWS[2])])
    return model_home


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overlap_lines(
    capsys: pytest.CaptureFixture[str], job: str, held_out: str, **columns: str | None
) -> list[str]:
    """Return a job's warnings on a held-out file, without their names and remedies."""
    kind, load, named, rest = JOBS[job]
    sources = {name: {"path": f"{name}.jsonl", **named} for name in ("first", "second")}
    config = kind.model_validate(
        {
            "run": {"directory": f"run-{held_out}", "steps": 1, "tensorboard": False},
            "cluster": {"where": "local"},
            "data": {
                "train": sources,
                "eval": {"path": f"{held_out}.jsonl", **named, **columns},
                "chat_template": "none",
                "step_separator": "" if job == "prm" else "\n",
            },
            "actor": MODEL,
            **rest,
        }
    )
    if load is None:
        assert isinstance(config, RlConfig)
        load = prompt_loader(spec_of(config))
    with open_session(spec_of(config), Planned()) as session:
        load_data(session, load)
    lines = capsys.readouterr().out.splitlines()
    return [line.partition(": on these, ")[0] for line in lines if " shares " in line]


@pytest.mark.parametrize("job", JOBS)
def test_held_out_rows_that_are_learned_from_are_counted(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that come twice count twice. Other columns do not matter."""
    rows = "prompts" if job == "ppo" else "rows"
    [line] = overlap_lines(capsys, job, "some")
    sources = (r"^data\.eval \(some\.jsonl\)", r"data\.train\.first \(first\.jsonl\)$")
    assert re.search(rf"{sources[0]} .*2 of its 4 {rows} .*{sources[1]}", line)
    assert overlap_lines(capsys, job, "other") == []
    [line] = overlap_lines(capsys, job, "second")
    assert re.search(rf"3 of its 3 {rows} .*data\.train\.second \(second\.jsonl\)$", line)


def test_a_pair_with_its_responses_the_other_way_round_is_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(overlap_lines(capsys, "dpo", "some", chosen="b", rejected="a")) == 1


def test_another_answer_to_the_same_prompt_is_another_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert overlap_lines(capsys, "sft", "some", response="b") == []


def test_pairs_held_out_of_labelled_responses_are_looked_into(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each pair is two responses; the better ones are those to learn from."""
    pairs = {"response": None, "label": None, "chosen": "a", "rejected": "b"}
    [line] = overlap_lines(capsys, "kto", "some", **pairs)
    assert " shares 2 of its 8 rows with " in line
