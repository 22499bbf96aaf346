"""A run that saves nothing: no checkpoint, no model; and what other commands say of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import SFT, Command, metrics, run_here, wait_for, write_config, write_task
from told_problems import read_problems

from plimsoll.run.ledger import read_ledger

NOTHING = ("--run.keep_checkpoints", "0", "--run.save_model", "false")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("unsaved")
    write_task(home)
    run = {"directory": "sft", "steps": 3, "save_every": 1, "eval_every": 3, "tensorboard": False}
    write_config(home, "sft", SFT | {"run": run})
    return home


def test_a_trial_saves_only_its_figures(home: Path) -> None:
    trial = run_here(home, "sft", "sft.yaml", "--run.directory", "trial", *NOTHING)
    assert trial.code == 0, trial.err
    assert "run.keep_checkpoints: 0" in trial.out and "run.save_model: false" in trial.out
    left = {path.name for path in (home / "trial").iterdir()}
    assert {"metrics.jsonl", "ledger.jsonl", "report.html"} <= left
    assert not left & {"checkpoints", "model"}
    assert {row.phase for row in read_ledger(home / "trial" / "ledger.jsonl")} == {
        *("data", "load", "train_actor", "eval")
    }
    plain = run_here(home, "sft", "sft.yaml", "--run.directory", "plain")
    assert plain.code == 0, plain.err
    assert metrics(home / "trial") == metrics(home / "plain")
    for words, said in (
        (("eval", "trial"), "run.keep_checkpoints is 0"),
        (("export", "trial", "--to", "out"), "run.keep_checkpoints is 0"),
        (("export", "plain", "--to", "out"), ""),
    ):
        found = run_here(home, *words)
        assert (found.code, said in found.err) == (0 if not said else 2, True), found.err
    again = run_here(home, "sft", "sft.yaml", "--run.directory", "trial", *NOTHING)
    assert again.code == 2
    [problem] = read_problems(again.err)
    assert (problem.key, problem.what) == ("run.directory", "trial")
    assert "run.resume is never" in problem.why and "run.resume: auto" in problem.fix


def test_a_model_may_be_all_that_is_saved(home: Path) -> None:
    flags = ("--run.directory", "model_alone", "--run.keep_checkpoints", "0")
    assert run_here(home, "sft", "sft.yaml", *flags).code == 0
    assert (home / "model_alone" / "model").is_dir()
    assert not (home / "model_alone" / "checkpoints").exists()
    found = run_here(home, "export", "model_alone", "--to", "out2")
    assert found.code == 2 and "model_alone/model" in found.err


def test_checkpoints_may_be_all_that_is_saved(home: Path) -> None:
    flags = ("--run.directory", "part", "--run.save_model", "false")
    part = run_here(home, "sft", "sft.yaml", *flags)
    assert part.code == 0, part.err
    kept = [home / "part" / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    assert "`plimsoll export part/checkpoints/step-000003 " in part.out
    assert not (home / "part" / "model").exists() and all(map(Path.is_dir, kept))
    more = ("--run.resume", "auto", "--run.steps", "4", "--run.keep_checkpoints", "0")
    rest = run_here(home, "sft", "sft.yaml", *flags, *more)
    assert rest.code == 0 and "resumed after step 3" in rest.out, rest.err
    assert sorted((home / "part" / "checkpoints").iterdir()) == kept
    assert [row["step"] for row in metrics(home / "part")] == [1, 2, 3, 4]


def test_ctrl_c_says_what_is_lost(home: Path) -> None:
    flags = ("--run.directory", "stopped", "--run.steps", "100000", "--run.eval_every", "null")
    command = Command(home, "sft", "sft.yaml", *flags, *NOTHING)
    rows = home / "stopped" / "metrics.jsonl"
    wait_for(lambda: rows.is_file() and len(rows.read_text().splitlines()) > 2, "three steps")
    command.process.send_signal(signal.SIGINT)
    found = command.finish()
    assert found.code == 130
    step = len(rows.read_text().splitlines())
    last = found.err.splitlines()[-1]
    assert f"step {step} of 100000" in last and f"{step} steps" in last
    assert "(run.keep_checkpoints: 0)" in last and "--run.resume auto" in last
    assert not (home / "stopped" / "checkpoints").exists()
