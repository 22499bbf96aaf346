"""The config of learning from pairs: columns, budget, options; what contradicts is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.resolve.load import load_spec

DPO = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, chosen: a, rejected: b}, max_tokens: 100}
batch: {micro_batch_tokens: 200}
actor: {model: {path: m}}
"""
EVAL = "--data.eval.path=x --data.eval.chosen=a --data.eval.rejected=b"

# (flags that contradict, the key that is told, exit code, the flags instead)
CASES = [
    ("--data.train.chosen=null", "data.train.chosen", 2, "--data.train.chosen=c"),
    ("--data.train.rejected=null", "data.train.rejected", 2, "--data.train.rejected=c"),
    ("--data.train.rejected=a", "data.train.rejected", 2, "--data.train.rejected=c"),
    ("--data.train.messages=m", "data.train.messages", 2, "--data.train.messages=null"),
    ("--data.train.response=r", "data.train.response", 2, "--data.train.response=null"),
    ("--data.eval.path=x --data.eval.chosen=a", "data.eval.rejected", 2, EVAL),
    (
        "--data.max_tokens=101",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=101 --batch.micro_batch_tokens=202",
    ),
    ("--run.eval_every=2", "run.eval_every", 4, f"--run.eval_every=2 {EVAL}"),
    (
        "--cluster.where=local --cluster.ranks=2",
        "cluster.ranks",
        4,
        "--cluster.where=ray --cluster.ranks=2",
    ),
    (
        "--actor.optimizer.warmup_steps=4",
        "actor.optimizer.warmup_steps",
        2,
        "--actor.optimizer.warmup_steps=4 --run.steps=4",
    ),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "dpo.yaml"
    file.write_text(DPO)
    return file


@pytest.mark.parametrize(("flags", "key", "code", "mend"), CASES)
def test_a_contradiction_is_refused_and_can_be_mended(
    path: Path, flags: str, key: str, code: int, mend: str
) -> None:
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        load_spec(JOBS["dpo"], str(path), flags.split())
    report = str(caught.value)
    assert report.startswith(f"1 problem in the settings\n  {key}"), report
    assert caught.value.exit_code == code
    known = tuple(keys_of(DpoConfig))
    for named in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", report.replace(str(path), "")):
        assert find_key(known, tuple(named.split("."))), named
    load_spec(JOBS["dpo"], str(path), mend.split())


def test_both_missing_columns_are_named(path: Path) -> None:
    flags = ["--data.train.chosen=null", "--data.train.rejected=null"]
    with pytest.raises(ConfigError, match=r"^2 problems"):
        load_spec(JOBS["dpo"], str(path), flags)


def test_a_pair_of_two_longest_sequences_fits_exactly(path: Path) -> None:
    config = load_spec(JOBS["dpo"], str(path), ["--algorithm.loss.name=ipo"]).config
    assert config.algorithm.loss.name == "ipo" and config.reference is None
