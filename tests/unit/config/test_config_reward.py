"""The configs of reward models: columns, budget, options; what contradicts is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.config.run import JobConfig
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.prm import PrmConfig
from plimsoll.jobs.rm import RmConfig
from plimsoll.jobs.which import job_of, load_any
from plimsoll.resolve.load import load_spec

PAIRS = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, chosen: a, rejected: b}, max_tokens: 100}
batch: {micro_batch_tokens: 200}
actor: {model: {path: m}}
"""
STEPS = PAIRS.replace("chosen: a, rejected: b", "prompt: p, steps: s, labels: l")
TEXTS: dict[type[JobConfig], str] = {RmConfig: PAIRS, DpoConfig: PAIRS, PrmConfig: STEPS}

# (job, flags that contradict, the key that is told, exit code, the flags instead)
CASES = [
    (RmConfig, "--data.train.chosen=null", "data.train.chosen", 2, "--data.train.chosen=c"),
    (
        RmConfig,
        "--data.max_tokens=101",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=101 --batch.micro_batch_tokens=202",
    ),
    (RmConfig, "--actor.model.quantization=nf4", "actor.model.quantization", 4, ""),
    (DpoConfig, "--data.train.margin=m", "data.train.margin", 2, ""),
    (PrmConfig, "--data.train.steps=null", "data.train.steps", 2, "--data.train.steps=t"),
    (PrmConfig, "--data.train.labels=null", "data.train.labels", 2, "--data.train.labels=k"),
    (PrmConfig, "--data.train.prompt=null", "data.train.prompt", 2, "--data.train.prompt=q"),
    (PrmConfig, "--data.train.messages=m", "data.train.messages", 2, ""),
    (PrmConfig, "--data.train.response=r", "data.train.response", 2, ""),
    (RmConfig, "--data.train.label=l", "data.train.label", 2, ""),
    (PrmConfig, "--run.eval_every=1", "run.eval_every", 4, ""),
    (
        PrmConfig,
        "--data.max_tokens=201",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=201 --batch.micro_batch_tokens=201",
    ),
]


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(("job", "flags", "key", "code", "mend"), CASES)
def test_a_contradiction_is_refused_and_can_be_mended(
    tmp_path: Path, job: type[JobConfig], flags: str, key: str, code: int, mend: str
) -> None:
    path = write(tmp_path, TEXTS[job])
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        load_spec(job_of(job), path, flags.split())
    report = str(caught.value)
    assert report.startswith(f"1 problem in the settings\n  {key}"), report
    assert caught.value.exit_code == code
    known = tuple(keys_of(job))
    for named in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", report.replace(path, "")):
        assert find_key(known, tuple(named.split("."))), named
    load_spec(job_of(job), path, mend.split())


def test_a_margin_and_another_loss_are_taken(tmp_path: Path) -> None:
    flags = ["--data.train.margin=m", "--algorithm.loss.name=log_exp", "--algorithm.centring=0.01"]
    config = load_spec(JOBS["rm"], write(tmp_path, PAIRS), flags).config
    assert (config.algorithm.loss.name, config.algorithm.centring) == ("log_exp", 0.01)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (f"# rm\n{PAIRS}", RmConfig),
        (f"# prm\n{STEPS}", PrmConfig),
        (STEPS, PrmConfig),
        (f"{PAIRS}algorithm: {{centring: 0.1}}\n", RmConfig),
    ],
)
def test_a_plan_knows_the_job(tmp_path: Path, text: str, job: type[JobConfig]) -> None:
    assert load_any(write(tmp_path, text)).job.config is job


def test_pairs_alone_may_be_two_jobs_and_are_asked_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could be a config for rm or dpo"):
        load_any(write(tmp_path, PAIRS))
