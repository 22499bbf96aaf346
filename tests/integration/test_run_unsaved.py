"""A run that saves nothing: no checkpoint, no model; and what other commands say of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import SFT, Command, metrics, run_here, wait_for, write_config, write_task

from plimsoll.run.ledger import read_ledger

NOTHING = ("--run.keep_checkpoints", "0", "--run.save_model", "false")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("unsaved")
    write_task(home)
    run = {"directory": "sft", "steps": 3, "save_every": 1, "eval_every": 3, "tensorboard": False}
    write_config(home, "sft", SFT | {"run": run})
    return home


def test_a_trial_leaves_its_figures_alone(home: Path) -> None:
    trial = run_here(home, "sft", "sft.yaml", "--run.directory", "trial", *NOTHING)
    assert trial.code == 0, trial.err
    assert "run.keep_checkpoints: 0: a run that is stopped or fails saves nothing" in trial.out
    assert "no model is written (run.save_model: false), and no checkpoint" in trial.out
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
        (("eval", "trial"), "its run.keep_checkpoints is 0. Train it again with 1 or more. It has"),
        (("export", "trial", "--to", "out"), "has no checkpoint: its run.keep_checkpoints is 0"),
        (("export", "plain", "--to", "out"), ""),
    ):
        found = run_here(home, *words)
        assert (found.code, said in found.err) == (0 if not said else 2, True), found.err
    again = run_here(home, "sft", "sft.yaml", "--run.directory", "trial", *NOTHING)
    assert again.code == 2
    assert "(without a checkpoint), and run.resume is never" in again.err
    assert "run.resume: auto begins it anew" in again.err


def test_a_model_may_be_all_that_is_saved(home: Path) -> None:
    flags = ("--run.directory", "model_alone", "--run.keep_checkpoints", "0")
    assert run_here(home, "sft", "sft.yaml", *flags).code == 0
    assert (home / "model_alone" / "model").is_dir()
    assert not (home / "model_alone" / "checkpoints").exists()
    found = run_here(home, "export", "model_alone", "--to", "out2")
    assert found.code == 2 and "Its final model is in model_alone/model." in found.err


def test_checkpoints_alone_and_what_goes_on_from_them_without_saving(home: Path) -> None:
    flags = ("--run.directory", "part", "--run.save_model", "false")
    part = run_here(home, "sft", "sft.yaml", *flags)
    assert part.code == 0, part.err
    kept = [home / "part" / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    assert "`plimsoll export part/checkpoints/step-000003 --to DIRECTORY` writes one" in part.out
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
    assert found.err.endswith(
        f"stopped after step {step} of 100000, as asked; nothing is saved (run.keep_checkpoints: "
        f"0), so what was learned in {step} steps is lost. To begin anew: run the same command "
        "with --run.resume auto\n"
    )
    assert not (home / "stopped" / "checkpoints").exists()
