"""Whole runs in one process, as a user starts them: what they leave, and how they go on."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from buckets import gathered, open_way, tensors_in
from choice import slow
from commands import (
    PPO,
    SFT,
    Command,
    Outcome,
    assert_reported,
    column,
    main_lines,
    metrics,
    run,
    run_here,
    write_config,
    write_task,
)
from ranks import RankProcesses
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll.config.engine import TrainedRole
from plimsoll.data.packing import pack
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS as COMMANDS
from plimsoll.records import Floats, Sample, from_packed
from plimsoll.resolve.load import load_spec
from plimsoll.run.directory import open_run
from plimsoll.run.files import is_temporary
from plimsoll.run.health import RANGES
from plimsoll.run.state import RunState
from plimsoll.sync.buckets import WeightBucket
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

HELD_OUT = [(f"3+{b}=", f" #### {3 + b}") for b in (1, 2, 3, 4)]
JOBS: dict[str, dict[str, Any]] = {"sft": SFT, "ppo": PPO}
SIGNALS = {"sft": signal.SIGINT, "ppo": signal.SIGTERM}
STOPPED = ["sft", slow("ppo")]
"""PPO is stopped by SIGTERM in test_run_deaths.py, and goes on in test_run_killed.py."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("local")
    write_task(home)
    for job, config in JOBS.items():
        write_config(home, job, config)
    return home


@pytest.fixture(scope="module", params=["sft", slow("ppo")])
def job(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(home: Path, job: str) -> Outcome:
    """A run from start to end."""
    return run(home, job, f"{job}.yaml")


@pytest.fixture(scope="module")
def interrupted(home: Path, job: str) -> Outcome:
    """The same run in another directory, asked by a signal to stop while step 4 or so goes on."""
    command = Command(home, job, f"{job}.yaml", "--run.directory", f"{job}-again")
    command.read_until(f"{job} step {3: >2}/")
    config = load_spec(COMMANDS[job], str(home / f"{job}.yaml")).run
    with pytest.raises(ConfigError, match=f"in use by process {command.process.pid}:"):
        open_run(
            config.model_copy(update={"directory": str(home / f"{job}-again"), "resume": "auto"})
        )
    command.process.send_signal(SIGNALS[job])
    return command.finish()


@pytest.fixture(scope="module")
def resumed(home: Path, job: str, interrupted: Outcome) -> Outcome:
    flags = ["--run.directory", f"{job}-again", "--run.resume", "auto"]
    return run_here(home, job, f"{job}.yaml", *flags)


def test_a_run_into_pipes_prints_plain_lines_and_no_noise(job: str, whole: Outcome) -> None:
    assert whole.code == 0 and whole.err == ""
    assert whole.out.isascii() and "\x1b" not in whole.out and "\r" not in whole.out
    steps = JOBS[job]["run"]["steps"]
    first, *rest, model, measuring = main_lines(whole.out)
    assert first == f"{job}: {steps} steps, written to {job}"
    assert model.startswith(f"the model is in {job}/model: ")
    assert "data.eval" in measuring and measuring.endswith(f"`plimsoll eval {job}`")
    shown = [int(line.split("|")[0].split()[-1].split("/")[0]) for line in rest]
    assert shown == list(range(0 if job == "ppo" else 1, steps + 1))


def test_the_run_directory_is_complete(home: Path, job: str, whole: Outcome) -> None:
    assert whole.code == 0
    directory, settings = home / job, JOBS[job]["run"]
    kept, asked = (
        load_spec(COMMANDS[job], str(path)).written
        for path in (directory / "config.yaml", home / f"{job}.yaml")
    )
    assert kept.data.date is not None and asked.data.date is None
    undated = kept.data.model_copy(update={"date": None})
    assert kept.model_copy(update={"data": undated}) == asked
    rows = metrics(directory)
    assert [row["step"] for row in rows if row["step"]] == list(range(1, settings["steps"] + 1))
    assert all(np.isfinite(value) for row in rows for value in row.values())
    if job == "ppo":
        without_turns = RANGES.keys() - {"rollout/prefix_cache_hits", "groups/dropped"}
        assert all(without_turns <= row.keys() for row in rows if row["step"])
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    last_but_one = settings["steps"] // settings["save_every"] * settings["save_every"]
    assert kept == [f"step-{last_but_one:06d}", f"step-{settings['steps']:06d}"]
    state = RunState.load(directory / "checkpoints" / kept[-1] / "state.json")
    assert state.step == settings["steps"]
    assert any((directory / "tensorboard").iterdir())
    assert_reported(directory)
    assert not [path for path in directory.rglob("*") if is_temporary(path)]


def test_sft_learns_and_its_model_computes_what_the_trainer_computed(home: Path) -> None:
    rows = metrics(home / "sft")
    losses = column(rows, "loss")
    assert losses[-1] < 0.5 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(home / "sft" / "model", dtype=torch.float32)
    samples = [held_out_sample(home / "sft" / "model", *row) for row in HELD_OUT]
    found = np.concatenate([plain_log_probs(model, sample) for sample in samples])
    assert rows[-1]["eval/loss"] == pytest.approx(-found.mean(), abs=1e-5)


@pytest.mark.slow
def test_a_run_whose_reader_goes_away_comes_to_its_end(home: Path) -> None:
    command = Command(home, "sft", "sft.yaml", "--run.directory", "unseen", "--run.steps", "3")
    command.read_until("sft: 3 steps")
    assert command.process.stdout is not None
    command.process.stdout.close()
    outcome = command.finish()
    assert outcome.code == 0 and outcome.err.count("goes on unseen") == 1
    assert len(metrics(home / "unseen")) == 3 and (home / "unseen" / "model").is_dir()


@pytest.mark.usefixtures("whole")
def test_ppo_writes_its_trajectories(home: Path, job: str) -> None:
    if job == "sft":
        assert not (home / "sft" / "trajectories").exists()
        return
    steps, batch = PPO["run"]["steps"], PPO["batch"]
    rows = {row["step"]: row for row in metrics(home / "ppo")}
    for step in range(1, steps + 1):
        table = parquet.read_table(home / "ppo" / "trajectories" / f"step-{step:06d}.parquet")
        assert table.num_rows == batch["prompts"] * batch["responses"]
        assert set(table["weight_version"].to_pylist()) == {step - 1}
        expected = [0.1 * n + m for n, m in _parts(table)]
        np.testing.assert_allclose(table["reward"].to_pylist(), expected, rtol=1e-6)
        assert rows[step]["reward"] == pytest.approx(np.mean(expected))
        assert rows[step]["sync/logprob_gap"] < 0.02 and rows[step]["mismatch/abs"] < 0.02
        lengths = [len(tokens) for tokens in table["tokens"].to_pylist()]
        assert rows[step]["response_tokens"] == pytest.approx(np.mean(lengths))


def _parts(table: Any) -> list[tuple[float, float]]:
    names = ("reward_length", "reward_answer")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


@dataclass(frozen=True)
class Restored:
    """A trainer's weights by their Hugging Face names, and its log-probs of the held-out rows."""

    bucket: WeightBucket
    log_probs: list[Floats]


def restore(place: Place, role: TrainedRole, checkpoint: Path, rows: list[Sample]) -> Restored:
    """Return what the trainer held when it wrote the checkpoint."""
    worker = Worker(place)
    worker.load_model("actor", role, 1.0)
    worker.load_checkpoint("actor", checkpoint)
    [planned] = open_way(worker, 2**30).buckets
    bucket = gathered(worker, planned)
    assert bucket is not None
    [packs] = pack(rows, 1, 64)
    return Restored(bucket, from_packed(packs, worker.log_probs("actor", packs)))


@pytest.mark.usefixtures("whole")
def test_the_model_is_the_trainers(home: Path, job: str, one_rank: RankProcesses) -> None:
    actor = load_spec(COMMANDS[job], str(home / f"{job}.yaml")).actor
    path = home / job / "model"
    model = actor.model.model_copy(update={"path": str(home / "model")})
    steps = JOBS[job]["run"]["steps"]
    checkpoint = home / job / "checkpoints" / f"step-{steps:06d}" / "actor"
    rows = [held_out_sample(path, *row) for row in HELD_OUT]
    role = actor.model_copy(update={"model": model})
    [restored] = one_rank.run(restore, role, checkpoint, rows)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, model.dtype))
    own = dict(plain.named_parameters(remove_duplicate=False))
    sent = tensors_in(restored.bucket)
    assert sent.keys() == own.keys() and "lm_head.weight" in own
    assert all(torch.equal(sent[name], own[name]) for name in own)
    tolerance = 1e-4 if model.dtype == "float32" else 0.05
    for row, found in zip(rows, restored.log_probs, strict=True):
        np.testing.assert_allclose(found, plain_log_probs(plain, row), atol=tolerance)


def held_out_sample(model: Path, prompt: str, response: str) -> Sample:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = np.array([*tokenizer.encode(prompt + response), tokenizer.eos_token_id])
    loss_mask = np.arange(len(tokens)) >= len(tokenizer.encode(prompt))
    return Sample(tokens, loss_mask)


def plain_log_probs(model: Any, row: Sample) -> Floats:
    tokens = torch.from_numpy(row.tokens)
    with torch.no_grad():
        scores = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    found: Floats = scores.gather(1, tokens[1:, None])[:, 0].numpy()[row.loss_mask[1:]]
    return found


@pytest.mark.parametrize("job", STOPPED, indirect=True)
def test_a_signal_saves_and_says_how_to_go_on(home: Path, job: str, interrupted: Outcome) -> None:
    assert interrupted.code == 130
    steps = JOBS[job]["run"]["steps"]
    message = re.fullmatch(
        r"\nstopping after this step; Ctrl-C again to stop at once\n"
        rf"stopped after step (\d+) of {steps}, as asked; everything is saved. "
        r"To go on: run the same command with --run.resume auto\n",
        interrupted.err,
    )
    assert message is not None, interrupted.err
    stopped = int(message[1])
    assert 3 <= stopped < steps
    assert not (home / f"{job}-again" / "model").exists()


@pytest.mark.parametrize("job", STOPPED, indirect=True)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    home: Path, job: str, whole: Outcome, resumed: Outcome
) -> None:
    assert whole.code == 0 and resumed.code == 0, resumed.err
    assert "resumed after step" in resumed.out
    one, other = home / job, home / f"{job}-again"
    assert metrics(one) == metrics(other)
    for path in sorted(one.glob("trajectories/*.parquet")):
        assert parquet.read_table(path) == parquet.read_table(other / "trajectories" / path.name)
    a, b = (load_file(d / "model" / "model.safetensors") for d in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_learns_nothing_more(home: Path) -> None:
    command = ("sft", "sft.yaml", "--run.directory", "done", "--run.steps", "2")
    assert run_here(home, *command).code == 0
    once = metrics(home / "done")
    again = run_here(home, *command, "--run.resume", "auto")
    assert again.code == 0
    assert re.search(r"\b2 \(run\.steps\).*model", again.out)
    assert "other settings" not in again.out
    assert metrics(home / "done") == once


def test_a_run_goes_on_with_other_settings_where_its_checkpoint_takes_them(home: Path) -> None:
    data = home / "growing.jsonl"
    data.write_text((home / "rows.jsonl").read_text())
    command = (
        "sft",
        "sft.yaml",
        "--run.directory",
        "changed",
        "--run.resume",
        "auto",
        "--data.train.path",
        "growing.jsonl",
    )
    assert run_here(home, *command, "--run.steps", "2").code == 0
    written = (home / "changed" / "config.yaml").read_text()
    refused = run_here(home, *command, "--run.steps", "3", "--actor.adapter.rank", "2")
    assert refused.code == 2 and "another adapter" in refused.err
    assert (home / "changed" / "config.yaml").read_text() == written
    data.write_text(data.read_text() + data.read_text().splitlines()[0] + "\n")
    changed = run_here(home, *command, "--run.steps", "3", "--run.seed", "7")
    assert changed.code == 0
    assert re.search(r"data\.train .* 16 .* 17 ", changed.out)
    assert ": run.seed: 0 -> 7, run.steps: 2 -> 3\n" in changed.out
    assert "seed: 7" in (home / "changed" / "config.yaml").read_text()
