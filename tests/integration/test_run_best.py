"""Early stopping, the best checkpoint and the moving average in a whole run; and going on in the
middle of an epoch, with all of these and dropout, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from choice import slow
from commands import SFT, cut_off, metrics, write_config, write_task
from peft import PeftModel
from test_run_local import HELD_OUT, held_out_sample, plain_log_probs
from transformers import AutoModelForCausalLM

from plimsoll.commands.planning import plan_run
from plimsoll.commands.run import run
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.state import RunState

BEST = {"min_delta": 100.0, "patience": 3}
"""No evaluation can be better than the first by so much, so that step 2 is the best."""

CONFIG = SFT | {
    "run": {
        "directory": "sft",
        "steps": 20,
        "save_every": 1,
        "keep_checkpoints": 6,
        "eval_every": 2,
        "best": BEST,
        "tensorboard": False,
    },
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "adapter": {"rank": 4, "dropout": 0.2},
        "optimizer": {"learning_rate": 0.01, "schedule": "wsd", "decay_steps": 4},
        "ema": {"decay": 0.5},
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("best")
    write_task(home)
    write_config(home, "sft", CONFIG)
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    go(home, "whole")
    return home / "whole"


def go(home: Path, directory: str, *flags: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        flags = (f"--run.directory={directory}", *flags)
        spec = load_spec(JOBS["sft"], "sft.yaml", list(flags))
        run(spec, plan_run(spec))


def test_it_stops_early_and_keeps_the_best_checkpoint(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 9))  # evaluated at 2; not better: 4, 6, 8
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert kept == [f"step-{step:06d}" for step in (2, 3, 4, 5, 6, 7, 8)]
    state = RunState.load(whole / "checkpoints" / kept[-1] / "state.json")
    assert (state.best, state.best_step) == (rows[1]["eval/loss"], 2)
    assert state.evaluations_since_best == 3


def test_the_model_is_the_average_of_the_best_step(home: Path, whole: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, whole / "model").eval()
    samples = [held_out_sample(whole / "model", *row) for row in HELD_OUT]
    found = -np.concatenate([plain_log_probs(model, sample) for sample in samples]).mean()
    losses = {row["step"]: row["eval/loss"] for row in metrics(whole) if "eval/loss" in row}
    assert found == pytest.approx(losses[2], abs=1e-5)
    assert abs(losses[8] - losses[2]) > 1e-3


@pytest.mark.parametrize("step", [slow(2), 3, slow(7)])
def test_from_any_step_it_goes_on_bit_for_bit(home: Path, whole: Path, step: int) -> None:
    again = home / f"from-{step}"
    cut_off(whole, again, step)
    go(home, again.name, "--run.resume=must")
    assert metrics(again) == metrics(whole)
    written = [(d / "model" / "adapter_model.safetensors").read_bytes() for d in (again, whole)]
    assert written[0] == written[1]
    latest = RunDirectory(again).latest_checkpoint()
    assert latest is not None and latest[0] == 8


def test_a_damaged_checkpoint_is_left_out_and_the_run_is_the_same(
    home: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = home / "damaged"
    cut_off(whole, again, 5)
    (file,) = (again / "checkpoints" / "step-000005" / "actor").glob("rank-*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    go(home, again.name, "--run.resume=auto")
    said = capfd.readouterr().err
    assert f"step-000005 is damaged: actor/{file.name} has the xxh3 checksum" in said
    assert "goes on from damaged/checkpoints/step-000004" in said
    assert said.strip() in (again / "run.log").read_text()
    assert metrics(again) == metrics(whole)
    aside = again / "checkpoints" / "step-000005.damaged" / "actor" / file.name
    assert aside.read_bytes() == content


def test_a_damaged_best_checkpoint_is_no_final_model(home: Path, whole: Path) -> None:
    again = home / "best-damaged"
    cut_off(whole, again, 8)
    (again / "checkpoints" / "step-000002" / "actor" / "weights.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"step-000002, .* actor/weights\.json has 2 bytes"):
        go(home, again.name, "--run.resume=must")
    assert not (again / "model").exists()
    go(home, again.name, "--run.resume=must", "--run.best.final_model=last")
    assert (again / "model" / "adapter_model.safetensors").is_file()
