"""A run of reinforcement learning that learns from what another run sampled."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import PPO, cut_off, metrics, run_here, write_config, write_task
from safetensors.torch import load_file
from told_problems import read_problems

from plimsoll.records import Trajectory
from plimsoll.run.directory import RunDirectory
from plimsoll.run.state import measure_file, read_manifest, write_manifest
from plimsoll.run.trajectories import read_trajectories

STEPS = 3
CONFIG: dict[str, Any] = {key: value for key, value in PPO.items() if key != "run"} | {
    "run": {"directory": "recorded", "steps": STEPS, "save_every": 1, "keep_checkpoints": STEPS},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recorded run."""
    home = tmp_path_factory.mktemp("replay")
    write_task(home)
    write_config(home, "config", CONFIG)
    assert run_here(home, "ppo", "config.yaml").code == 0
    return home


def replayed(home: Path, directory: str, *more: str) -> Path:
    run = "--run.directory", directory
    done = run_here(home, "ppo", "config.yaml", "--replay", "recorded", *run, *more)
    assert done.code == 0, done.err
    return home / directory


def learned(directory: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without those of what a replay does not do."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("sync/", "groups/"))}
        for row in metrics(directory)
    ]


def tokens_and_rewards(directory: Path, step: int) -> list[tuple[Any, ...]]:
    def plain(t: Trajectory) -> tuple[Any, ...]:
        return t.group, t.response_tokens.tolist(), t.rewards, t.sampler_logprobs.tolist()

    return [plain(t) for t in read_trajectories(RunDirectory(directory).trajectories_path(step))]


def assert_same(one: Path, other: Path) -> None:
    """The same figures, the same trajectories, and bit for bit the same weights."""
    assert learned(one) == learned(other)
    for step in range(1, STEPS + 1):
        assert tokens_and_rewards(one, step) == tokens_and_rewards(other, step)
    wanted, found = (load_file(d / "model" / "model.safetensors") for d in (one, other))
    assert wanted.keys() == found.keys()
    for name, weight in wanted.items():
        assert torch.equal(weight, found[name]), name


def test_a_replay_learns_what_the_recorded_run_learned(home: Path) -> None:
    again = replayed(home, "again")
    assert len(metrics(again)) == STEPS
    assert_same(home / "recorded", again)
    phases = {json.loads(line)["phase"] for line in (again / "ledger.jsonl").open()}
    assert {"score", "train_actor", "train_critic"} <= phases
    assert phases.isdisjoint({"rollout", "sync"})


def test_a_replay_goes_on_where_it_stopped(home: Path) -> None:
    whole = replayed(home, "whole")
    cut_off(whole, home / "parts", 1)
    assert_same(whole, replayed(home, "parts", "--run.resume", "must"))


def test_a_replay_does_not_go_on_with_prompts_that_engines_were_sampling(home: Path) -> None:
    whole = replayed(home, "waiting", "--run.keep_checkpoints", str(STEPS))
    cut_off(whole, home / "cut", 1)
    saved = home / "cut" / "checkpoints" / "step-000001"
    file = saved / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"unlearned": [5]}))
    write_manifest(saved, [measure_file(saved, one.name) for one in read_manifest(saved)])
    flags = ("--run.directory", "cut", "--run.resume", "must")
    done = run_here(home, "ppo", "config.yaml", "--replay", "recorded", *flags)
    assert done.code == 2 and "step 1 has 1 prompt that" in done.err


def test_an_evaluation_of_a_replay_has_engines(home: Path) -> None:
    replayed(home, "measured", "--run.steps", "1")
    done = run_here(home, "eval", "measured")
    assert done.code == 0, done.err
    assert json.loads((home / "measured" / "eval.json").read_text())["rows"] == 4


def test_another_loss_learns_from_the_same_trajectories(home: Path) -> None:
    other = replayed(home, "other", "--algorithm.policy_loss.options.clip_high", "0.01")
    assert tokens_and_rewards(other, 1) == tokens_and_rewards(home / "recorded", 1)
    assert learned(other)[0]["reward"] == learned(home / "recorded")[0]["reward"]
    assert learned(other)[-1]["clip_fraction"] > learned(home / "recorded")[-1]["clip_fraction"]


def test_a_dry_run_and_a_plan_of_a_replay_know_no_engine(home: Path) -> None:
    flags = "--replay", "recorded", "--run.directory", "planned"
    told = run_here(home, "ppo", "config.yaml", "--dry-run", *flags)
    assert told.code == 0, told.err
    assert "rollout (transformers)" not in told.out
    assert re.search(r"\n  sequences .*\brecorded\b", told.out)
    plans = [
        json.loads(run_here(home, "plan", "config.yaml", "--json", *more).out)
        for more in (("--replay", "recorded"), ())
    ]
    assert [{"rollout", "sync"} <= {item["phase"] for item in plan["items"]} for plan in plans] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("flags", "key", "code", "why"),
    [
        (("--run.steps", "4"), "rollout.replay", "replay-steps", "step 4,"),
        (("--batch.prompts", "4"), "rollout.replay", "replay-batch", "4 x 2 = 8"),
        (("--run.eval_every", "1"), "run.eval_every", "replay-without-engines", ""),
        (
            ("--algorithm.advantage.name", "remax"),
            "algorithm.advantage",
            "replay-without-engines",
            "",
        ),
        (("--replay", "nowhere"), "rollout.replay", "replay-steps", "no such directory"),
        (("--replay", "data"), "rollout.replay", "replay-steps", "no trajectories"),
        (
            ("--run.directory", "recorded", "--run.resume", "auto"),
            "rollout.replay",
            "replay-steps",
            "run.directory itself",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_loaded(
    home: Path, flags: tuple[str, ...], key: str, code: str, why: str
) -> None:
    (home / "data").mkdir(exist_ok=True)
    given = {"--replay": "recorded", "--run.directory": "refused"}
    own = [word for pair in given.items() if pair[0] not in flags for word in pair]
    done = run_here(home, "ppo", "config.yaml", *own, *flags, "--dry-run")
    first, *_ = read_problems(done.err)  # remax has no use for the critic, too
    assert (first.key, first.code) == (key, code) and why in first.why
    assert done.code == (2 if code == "replay-steps" else 4)


def test_a_model_of_another_vocabulary_is_refused(home: Path) -> None:
    small, flags = home / "small", ("--replay", "recorded", "--run.directory", "refused")
    shutil.copytree(home / "model", small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 4}))
    own = "--actor.model.path", "small", "--critic.model.path", "small"
    done = run_here(home, "ppo", "config.yaml", *flags, *own, "--dry-run")
    assert done.code == 4
    [problem] = read_problems(done.err)
    assert problem.code == "replay-vocabulary"
    assert re.search(r"\bsmall \(actor\.model\.path\) .* 3\b", problem.why)


def test_a_tokenizer_that_reads_other_text_is_refused(home: Path) -> None:
    other, flags = home / "other-tokens", ("--replay", "recorded", "--run.directory", "refused")
    shutil.copytree(home / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {str(digit): vocabulary[str((digit + 1) % 10)] for digit in range(10)}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = "--actor.model.path", "other-tokens", "--critic.model.path", "other-tokens"
    done = run_here(home, "ppo", "config.yaml", *flags, *own)
    assert done.code == 2
    assert re.search(r"\btokenizer of\s+other-tokens\b", done.err)


@pytest.mark.parametrize("step", [1, STEPS])
def test_a_bundle_of_a_step_is_computed_again_without_the_model(home: Path, step: int) -> None:
    """Advantages and returns of a critic, with the KL in the reward."""
    file = f"step-{step}.zip"
    assert run_here(home, "rollouts", "recorded", "--step", str(step), "--bundle", file).code == 0
    checked = run_here(home, "check-bundle", file)
    assert checked.code == 0, checked.err
    assert re.search(r"returns: (\S+) of \1 tokens equal", checked.out), checked.out
