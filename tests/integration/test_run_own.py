"""Losses and rewards of one's own in real runs: what they raise, and names that the run keeps for
itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import PPO, metrics, run_here, write_config
from kto_cases import KTO, SEQUENCES, STEPS, write_labelled
from kto_cases import PAIRS as PAIRS_FLAGS

from plimsoll.algorithm.choice import is_run_metric
from plimsoll.config.rl import FUNCTIONS
from plimsoll.run.ledger import read_ledger

MINE = """
import torch

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.feedback import feedback_output

CALLS, ANSWERS = [], []

def breaks(trajectory, *, at: int):
    ANSWERS.append(trajectory)
    return {}["answer"] if len(ANSWERS) == at else 0.0

def rewards(inputs):
    signs_S = torch.where(inputs.desirable_S, 1.0, -1.0)
    return feedback_output(-signs_S * inputs.logratios_S, inputs.logratios_S, inputs)

def tires(inputs):
    CALLS.append(None)
    if len(CALLS) == 3:
        return {}["patience"]
    return rewards(inputs)

def renames(inputs):
    found = rewards(inputs)
    return LossOutput(found.loss, found.metrics | {"accuracy": torch.tensor(0.75)})
"""
HELD_OUT = SEQUENCES * STEPS
"""Of PPO's prompts, which are the same in both sources, and each is answered once."""
STEP = PPO["batch"]["prompts"] * PPO["batch"]["responses"]
ONCE = ("--batch.micro_batch_tokens", "512", "--run.eval_every", "null")
"""A step is one micro-batch."""
PAIRS = ("accuracy", "rewards/margin", "rewards/chosen", "rewards/rejected")
TOLD = {
    "kto": ("feedback_loss", "kl", "rewards/margin", "rewards/desirable", "rewards/undesirable"),
    "dpo": ("preference_loss", *PAIRS),
    "rm": ("reward_loss", *PAIRS),
    "ppo": ("policy_loss", "clip_fraction", "approx_kl", "ratio", "ratio_clamped"),
}
"""Of a job the package of its losses, and what the default one tells."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with configs of all jobs that take a loss of the user's own."""
    home = tmp_path_factory.mktemp("own")
    write_labelled(home)
    (home / "my_own_loss.py").write_text(MINE)
    prompts = {"path": "rows.jsonl", "prompt": "q", "reference": "a"}
    data = {**PPO["data"], "train": prompts, "eval": prompts}
    write_config(home, "ppo", {**PPO, "data": data})
    paired = {k: v for k, v in KTO.items() if k not in ("reference", "algorithm")}
    write_config(home, "rm", {**paired, "batch": {"pairs": 3, "micro_batch_tokens": 64}})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(home)
        yield home


@pytest.mark.parametrize("job", TOLD)
def test_all_names_that_a_run_gives_are_kept_for_it(home: Path, job: str) -> None:
    """Here with the default loss: what is left is its own."""
    flags = ["--run.directory", f"named-{job}", "--run.steps", "2", "--run.eval_every", "1"]
    flags += PAIRS_FLAGS if job in ("dpo", "rm") else ()
    assert run_here(home, job, f"{job}.yaml", *flags).code == 0
    package, *own = TOLD[job]
    seen = {name for row in metrics(home / f"named-{job}") for name in row}
    if job != "ppo":  # what a loss tells is in the evaluation, too
        seen |= {name.removeprefix("eval/") for name in seen}
    assert {name for name in seen if not is_run_metric(package, name)} == set(own)
    assert {package for package, *_ in TOLD.values()} == {n for n in FUNCTIONS if "loss" in n}


TIRES = r"algorithm\.loss: 'my_own_loss:tires' .*KeyError: 'patience'$"


def test_an_error_in_a_loss_is_reported_with_its_lines_and_the_step(home: Path) -> None:
    flags = ("--algorithm.loss.name", "my_own_loss:tires", "--algorithm.loss.options", "{}")
    failed = run_here(home, "kto", "kto.yaml", "--run.directory", "tired", *ONCE, *flags)
    assert failed.code == 1
    _, _, told = failed.err.partition("error: ")
    first, where, line, code, *_ = told.splitlines()
    assert re.match(TIRES, first) and where.endswith("phase train_actor of step 3")
    assert line.endswith('my_own_loss.py", line 20, in tires')
    assert code.strip() == 'return {}["patience"]'


@pytest.mark.engine
def test_an_error_in_a_loss_on_ranks_is_reported_in_the_same_way(
    home: Path, shared_ray: tuple[str, ...]
) -> None:
    flags = ("--algorithm.loss.name", "my_own_loss:tires", "--algorithm.loss.options", "{}")
    ranks = (*shared_ray, "--run.directory", "tired-ranks")
    failed = run_here(home, "kto", "kto.yaml", *ONCE, *flags, *ranks)
    assert failed.code == 1
    _, _, told = failed.err.partition("error: ")
    first, where, *_ = told.splitlines()
    assert re.match(TIRES, first) and where.endswith("phase train_actor of step 3")
    assert 'my_own_loss.py", line 20, in tires' in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("at", "row", "phase"),
    [
        (3, r"2 \(from 0\) of data\.eval", "eval of step 0, before training"),
        (HELD_OUT + STEP + 3, r"2 \(from 0\) of data\.eval", "eval of step 1"),
    ],
)
def test_an_error_in_a_reward_is_reported_with_its_row(
    home: Path, monkeypatch: pytest.MonkeyPatch, at: int, row: str, phase: str
) -> None:
    monkeypatch.delitem(sys.modules, "my_own_loss", raising=False)  # it counts from the beginning
    mine = ("--rewards.mine.name", "my_own_loss:breaks", "--rewards.mine.options.at", str(at))
    run_flags = ["--run.directory", f"broken-{at}", "--run.eval_every", "1"]
    run_flags += ["--rewards.mine.retries", "0"]
    failed = run_here(home, "ppo", "ppo.yaml", *run_flags, *mine)
    assert failed.code == 1
    told = rf"'mine' \(my_own_loss:breaks\), at row {row} .*KeyError: 'answer'\."
    assert re.search(rf"{told}.*\n  .* phase {phase}\n", failed.err)
    before = {row.step for row in read_ledger(home / f"broken-{at}" / "ledger.jsonl")} - {1}
    assert before == {0}  # also where the evaluation before training did not end


@pytest.mark.parametrize("retries", [0, 1])
def test_a_group_whose_reward_fails_in_training_is_tried_again_or_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    monkeypatch.delitem(sys.modules, "my_own_loss", raising=False)  # it counts from the beginning
    directory = home / f"replaced-{retries}"
    mine = ("--rewards.mine.name", "my_own_loss:breaks", "--rewards.mine.options.at", "2")
    flags = ("--rewards.mine.retries", str(retries), "--run.eval_every", "null", "--run.steps", "1")
    done = run_here(home, "ppo", "ppo.yaml", "--run.directory", str(directory), *mine, *flags)
    assert done.code == 0, done.err
    [row] = metrics(directory)
    assert row["groups/failed"] == (1 if retries == 0 else 0)
    assert row["groups/drawn"] == PPO["batch"]["prompts"] + row["groups/failed"]


def test_a_metric_with_a_name_of_the_run_is_refused_at_the_first_step(home: Path) -> None:
    flags = ("--algorithm.loss.name", "my_own_loss:renames", "--algorithm.loss.options", "{}")
    refused = run_here(home, "kto", "kto.yaml", "--run.directory", "renamed", *ONCE, *flags)
    assert refused.code == 2
    assert re.search("'my_own_loss:renames' .*'accuracy'", refused.err)
    assert not (home / "renamed" / "metrics.jsonl").exists()
