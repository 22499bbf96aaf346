"""A step in one file: what is computed again is equal, and what was changed is found."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plimsoll.cli import main
from plimsoll.records import ADVANTAGES, Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import StepDraw, write_trajectories

STEP = 4
CONFIG = """
algorithm:
  advantage: {name: grpo}
  policy_loss: {name: clip}
  correction: null
  kl: none
rewards: {mine: {name: 'mine.py:given'}}
"""
ADVANTAGE = (
    0.5**0.5
)  # of rewards 0 and 1: 0.5 less or more than the mean, by a deviation of 0.5**0.5


def sampled(number: int, length: int, reward: float) -> Trajectory:
    tokens = np.arange(length)
    prompt = Prompt(0, np.array([1, 2], np.int32), "1+1?", "2")
    logprobs = np.full(length, -0.5, np.float32)
    parts = (RewardPart("mine", reward),)
    return single_turn(prompt, number, tokens, logprobs, "2", "stop", 3, parts, group=9)


ROWS = [sampled(0, 1, 0.0), sampled(1, 3, 1.0)]
METRICS = {
    "step": STEP,
    "reward": 0.5,
    "response_tokens": 2.0,
    # The mean over four tokens of minus the advantage: one has less, three have more.
    "policy_loss": -ADVANTAGE * (3 - 1) / 4,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(METRICS, ROWS)
    return tmp_path


def write_run(metrics: dict[str, float], rows: list[Trajectory], config: str = CONFIG) -> None:
    run = RunDirectory(Path("run"))
    path = run.trajectories_path(STEP)
    path.parent.mkdir(parents=True, exist_ok=True)
    run.config_path.write_text(config)
    run.metrics_path.write_text(json.dumps(metrics) + "\n")
    estimated = (-ADVANTAGE, ADVANTAGE)
    scored = [
        t.add_columns({ADVANTAGES: np.full(len(t.response_tokens), a, np.float32)})
        for t, a in zip(rows, estimated, strict=True)
    ]
    draw = StepDraw("", 1, {}, {}, (), {})
    write_trajectories(path, STEP, scored, draw)


def bundle(*more: str) -> int:
    Path("step.zip").unlink(missing_ok=True)
    return main(["rollouts", "run", "--bundle", "step.zip", *more])


def check(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    capsys.readouterr()
    return main(["check-bundle", "step.zip", *more]), *capsys.readouterr()


def test_what_a_run_wrote_is_equal_where_the_run_is_not(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a model nor the reward's own code is there."""
    assert bundle() == 0
    (home / "run").rename(home / "elsewhere")
    code, out, error = check(capsys)
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("step 4, schema 1") and lines[0].endswith(": 2 responses")
    assert lines[1] == "metrics: 2 of 2 equal"
    assert lines[2].startswith("advantages: 4 of 4 tokens equal")
    assert lines[3].startswith("policy loss: -0.353553 at")


@pytest.mark.parametrize(
    ("metrics", "rows", "wrong"),
    [
        ({"reward": 0.6}, ROWS, "metrics: reward was 0.6, and is 0.5"),
        ({}, [ROWS[0], replace(ROWS[1], rewards=())], "rewards: not every response has the same"),
        ({}, [sampled(0, 1, 0.4), ROWS[1]], "metrics: reward was 0.5, and is 0.7"),
        ({}, [sampled(0, 1, 1.0), sampled(1, 3, 0.0)], "advantages: 0 of 4 tokens equal"),
        ({"policy_loss": -0.3}, ROWS, "policy loss: -0.353553 at"),
    ],
)
def test_what_does_not_follow_is_told(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    metrics: dict[str, float],
    rows: list[Trajectory],
    wrong: str,
) -> None:
    write_run(METRICS | metrics, rows)
    bundle()
    code, _, error = check(capsys)
    assert code == 1 and wrong in error


def test_a_loss_of_log_probs_that_are_not_there_is_not_compared(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """REINFORCE's is -A log p of the update, of which the bundle has the sampler's alone."""
    write_run(METRICS, ROWS, CONFIG.replace("name: clip", "name: reinforce"))
    bundle()
    code, out, _ = check(capsys)
    assert code == 0 and "it depends on log-probs of the update" in out


def test_a_changed_or_newer_bundle_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle()
    whole = Path("step.zip").read_bytes()
    contents = {}
    with zipfile.ZipFile("step.zip") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(contents["bundle.json"])
    for change, said in (
        ({"bundle.json": json.dumps(about | {"schema": 2}).encode()}, "of schema 2, written by"),
        ({"metrics.json": b"{}"}, "metrics.json has another SHA-256"),
        ({"more": b""}, "no whole bundle"),
        ({"bundle.json": b"[]"}, "no whole bundle"),
        (
            {"bundle.json": json.dumps({k: about[k] for k in ("schema", "sha256")}).encode()},
            "'step'",
        ),
    ):
        with zipfile.ZipFile("step.zip", "w") as archive:
            for name, content in (contents | change).items():
                archive.writestr(name, content)
        code, _, error = check(capsys)
        assert code == 2 and said in error
    Path("step.zip").write_bytes(whole[: len(whole) // 2])
    assert check(capsys)[0] == 2


def test_code_of_the_config_runs_only_if_it_is_trusted(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advantage's, which is computed again; the reward's is not called."""
    Path("mine.py").write_text("from plimsoll.algorithm.advantage import grpo as ours\n")
    write_run(METRICS, ROWS, CONFIG.replace("name: grpo", "name: 'mine.py:ours'"))
    bundle()
    code, _, error = check(capsys)
    assert code == 2 and "mine.py:ours" in error and "--trust-run" in error
    assert check(capsys, "--trust-run")[0] == 0


def test_a_step_that_did_not_end_and_a_file_that_exists(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle("--step", "3") == 2
    assert "no trajectories of step 3" in capsys.readouterr().err
    assert bundle() == 0 and main(["rollouts", "run", "--bundle", "step.zip"]) == 2
    assert "step.zip exists" in capsys.readouterr().err
    Path("run/metrics.jsonl").write_text("")
    assert bundle() == 2 and "did not end" in capsys.readouterr().err
