"""Whole runs and their ledgers: every phase, every process, each once; what report and calibrate
make of them; a leak that is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choice import slow
from commands import PPO, SFT, Outcome, run, run_here, write_config, write_task

from plimsoll.commands.demo import make_tokenizer
from plimsoll.memory.weigh import BAND
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.page.ledger import compare
from plimsoll.run.ledger import LedgerRow, read_ledger

CPU = {"device": "cpu", "threads": 1}
STEPS = 6
OF_PPO = ["rollout", "score", "train_critic", "train_actor", "sync"]
"""The phases of each of its steps."""

LEAKY = """
kept = []

def grow(trajectory):
    kept.append(b"x" * 2**20)
    return 0.0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ledger")
    write_task(home)
    run_settings = {"directory": "sft", "steps": STEPS, "save_every": 3, "eval_every": 3}
    settings = {"run": run_settings, "cluster": {"where": "local"} | CPU}
    write_config(home, "sft", SFT | settings)
    return home


@pytest.fixture(scope="module")
def sft(home: Path) -> Outcome:
    return run(home, "sft", "sft.yaml")


def keys(rows: Sequence[LedgerRow]) -> set[tuple[int, str, str]]:
    found = {(row.step, row.phase, row.process) for row in rows}
    assert len(found) == len(rows), "a step, phase and process has two rows"
    return found


def places(found: set[tuple[int, str, str]]) -> set[tuple[str, str]]:
    """Return the phases and processes: each has a row, and more only where a maximum moved."""
    return {(phase, process) for _, phase, process in found}


def check_rows(rows: Sequence[LedgerRow], every: set[tuple[int, str, str]]) -> None:
    """Check that rows are among those of every step, and that no phase or process is missing."""
    assert keys(rows) <= every
    assert places(keys(rows)) == places(every)


def expected(steps: dict[int, list[str]], processes: Sequence[str]) -> set[tuple[int, str, str]]:
    return {
        (step, phase, p) for step, phases in steps.items() for phase in phases for p in processes
    }


def check_sane(rows: Sequence[LedgerRow]) -> None:
    """Small processes are mostly interpreter and libraries: predicted within a factor of 2."""
    for row in rows:
        assert row.measured.host >= row.held.host > 10 * 2**20, row
        assert row.line.used < row.line.capacity and row.seconds >= 0
        assert (row.predicted is None) == (row.phase == "data")
        if row.predicted is not None:
            assert 0.5 < row.measured.host / row.predicted.host < 2, row


def test_the_ledger_of_sft_is_complete(home: Path, sft: Outcome) -> None:
    assert sft.code == 0, sft.err
    rows = read_ledger(home / "sft" / "ledger.jsonl")
    phases = {step: ["train_actor"] for step in range(1, STEPS + 1)}
    phases[1] += ["data", "load"]
    for step in (3, 6):
        phases[step] += ["eval", "save"]
    check_rows(rows, expected(phases, ["local", "node 0"]))
    check_sane(rows)
    assert re.search(r"\| memory local 0\.\d+ GB \(plan 0\.\d+\) \|", sft.out)


def test_a_resumed_run_has_each_row_once(home: Path, sft: Outcome) -> None:
    again = home / "again"
    shutil.copytree(home / "sft", again)
    for folder in (again / "model", again / "checkpoints" / "step-000006"):
        shutil.rmtree(folder)
    before = read_ledger(again / "ledger.jsonl")
    flags = ["--run.directory", "again", "--run.resume", "auto"]
    outcome = run_here(home, "sft", "sft.yaml", *flags)
    assert outcome.code == 0, outcome.err
    rows = read_ledger(again / "ledger.jsonl")
    new = expected({4: ["data", "load", "train_actor"], 6: ["eval", "save"]}, ["local", "node 0"])
    assert new <= keys(rows), "the processes are new"
    assert [row for row in rows if row.step <= 3] == [row for row in before if row.step <= 3]


def test_the_report_shows_predicted_and_measured(home: Path, sft: Outcome) -> None:
    outcome = run_here(home, "report", "sft")
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.out.splitlines() if line.startswith(("local", "node"))]
    assert {line.split()[0] for line in lines} == {"local"}
    assert all(len(line) <= 80 for line in lines)
    phase, memory, predicted, measured, over, seconds = re.split(r"  +", lines[2])[1:]
    assert (phase, memory) == ("train_actor", "host")
    assert re.fullmatch(r"\d+ MB", predicted) and re.fullmatch(r"\d+ MB", measured)
    assert re.fullmatch(r"[+-]\d+%", over) and float(seconds) >= 0
    assert re.search(r"local in \w+, step \d", outcome.out)
    page = (home / "sft" / "report.html").read_text()
    assert re.findall(r'(?:src|href)="', page) == []  # nothing is fetched
    assert "train_actor" in page and "micro_batch_tokens" in page


def test_a_calibrated_plan_meets_the_run_and_says_so(home: Path, sft: Outcome) -> None:
    outcome = run_here(home, "calibrate", "sft", "--out", "mine.json")
    assert outcome.code == 0, outcome.err
    stored = json.loads((home / "mine.json").read_text())
    assert list(stored) == ["worker_process"]
    source = stored["worker_process"]["source"]
    assert re.search(r"\d{4}-\d\d-\d\d on sft: ", source) and re.search(r" torch \d", source)
    flags = ["--cluster.calibration", "mine.json", "--run.directory", "calibrated"]
    outcome = run(home, "sft", "sft.yaml", *flags)
    assert outcome.code == 0, outcome.err
    saving = [r for r in read_ledger(home / "calibrated" / "ledger.jsonl") if r.phase == "eval"]
    for row in saving:
        assert row.predicted is not None
        assert row.measured.host == pytest.approx(row.predicted.host, rel=0.15)
    dry = ("--run.directory", "other", "--dry-run")
    shown = run_here(home, "sft", "sft.yaml", *flags[:2], *dry)
    assert "calibrated: worker_process, calibrated" in shown.out


@pytest.mark.engine
@pytest.mark.slow
def test_a_leak_in_a_reward_is_named(home: Path) -> None:
    (home / "leaky.py").write_text(LEAKY)
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": "leaky", "steps": 42},
        "cluster": {"where": "ray"} | CPU,
        "rewards": {"leak": {"name": "leaky:grow"}},
        "algorithm": {"mini_batches": 1, "epochs": 1},
    }
    write_config(home, "leaky", PPO | changes)
    outcome = run(home, "ppo", "leaky.yaml")
    assert outcome.code == 0, outcome.err
    rows = read_ledger(home / "leaky" / "ledger.jsonl")
    check_sane([row for row in rows if row.step <= 5])
    processes = ["controller", "rank 0", "engine 0", "node 0"]
    phases = dict.fromkeys(range(1, 43), OF_PPO)
    phases |= {1: [*OF_PPO, "load"], 42: [*OF_PPO, "save"]}
    data = expected({1: ["data"]}, ["controller", "node 0"])
    check_rows(rows, expected(phases, processes) | data)
    leaks = re.findall(r"^(\w+) holds (\S+) MB more host memory .* from (\w+):", outcome.out, re.M)
    assert [(process, phase) for process, _, phase in leaks] == [("controller", "rollout")]
    per_step = 12 * 2**20 / 1e6  # 6 prompts, 2 responses
    assert float(leaks[0][1]) == pytest.approx(per_step, rel=0.1)
    again = run_here(home, "report", "leaky")
    assert "Leak: controller holds" in again.out


SELDOM = ("load", "eval", "save")
COLUMNS: dict[str, dict[str, str]] = {
    "sft": {"prompt": "q", "response": "a"},
    "distill": {"prompt": "q", "response": "a"},
    "dpo": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "kto": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "rm": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "prm": {"prompt": "q", "steps": "steps", "labels": "labels"},
    "ppo": {"prompt": "q", "reference": "a"},
}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28M parameters, whose copies are well above what processes differ by."""
    home = tmp_path_factory.mktemp("larger")
    shape = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "feed_forward": 1408}
    config = tiny_config("qwen2", True, vocab=8192, **shape)
    write_tiny_model(home / "model", config, 0, make_tokenizer())
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        a, b = ("".join(map(str, rng.integers(10, size=100))) for _ in range(2))
        rows.append({"q": "1+1=", "a": a, "b": b, "steps": [a[:50], b[:50]], "labels": [True, 0]})
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def larger_config(job: str) -> dict[str, Any]:
    """Short sequences, two steps, and an evaluation and a checkpoint after each."""
    role = {"model": {"path": "model"}}
    source = {"path": "rows.jsonl"} | COLUMNS[job]
    size = {"dpo": "pairs", "rm": "pairs", "ppo": "prompts"}.get(job, "sequences")
    longest = 8 if job == "ppo" else 128
    config: dict[str, Any] = {
        "run": {"directory": job, "steps": 2, "save_every": 1, "eval_every": 1},
        "cluster": {"where": "local"} | CPU,
        "data": {"train": source, "eval": source, "chat_template": "none", "max_tokens": longest},
        "batch": {size: 8, "micro_batch_tokens": 512},
        "actor": role,
    }
    if job == "distill":
        config["teacher"] = role
    if job == "ppo":
        config["batch"]["responses"] = 2
        config |= {"critic": role, "rewards": {"length": {"name": "length"}}}
        config["rollout"] = {
            "transformers": {"max_sequences": 32},
            "sampling": {"max_new_tokens": 64},
        }
    return config


def check_complete(ledger: Sequence[LedgerRow]) -> None:
    """Check the rows of two steps of PPO, with an evaluation before them and after each."""
    after = {step: [*OF_PPO, "eval", "save"] for step in (1, 2)}
    phases = {0: ["data", "load", "sync", "eval"]} | after
    check_rows(ledger, expected(phases, ["local", "node 0"]))
    check_sane(ledger)


@pytest.mark.parametrize("job", [*map(slow, COLUMNS)])
def test_every_phase_of_a_local_run_is_within_the_band(larger: Path, job: str) -> None:
    """A phase of every step also has what the one before it freed less than a second ago, which
    after the first step is a save's; PPO's loading and evaluation are known to be 13 % and 14 %
    over, DPO's loading 10.03 % at most and its evaluation 16 % on a busy machine, which frees what
    the step held later: all below their fullest phases."""
    write_config(larger, job, larger_config(job))
    outcome = run(larger, job, f"{job}.yaml", "--force")
    assert outcome.code == 0, outcome.err
    ledger = read_ledger(larger / job / "ledger.jsonl")
    if job == "ppo":
        check_complete(ledger)
    rows = [one for one in compare(ledger) if one.predicted]
    own = {one.phase: one for one in rows if one.process == "local"}
    assert own.keys() >= {*SELDOM, "train_actor"}
    above = {"ppo": SELDOM, "dpo": ("load", "eval")}.get(job, ())
    seldom = [phase for phase in SELDOM if phase not in above]
    every = max(one.predicted or 0 for one in own.values())
    for one in own.values():
        expected = (one.predicted or 0) if one.phase in seldom else every
        assert one.measured < (1 + BAND.share) * expected, one
    peak = max(one.measured for one in own.values())
    assert peak > (1 - 2 * BAND.share) * max(one.predicted or 0 for one in own.values())
