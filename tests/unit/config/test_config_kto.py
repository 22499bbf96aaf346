"""The config of learning from labelled responses, and of a reference that scores before the actor:
what contradicts is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.kto import KtoConfig
from plimsoll.jobs.which import load_any
from plimsoll.resolve.load import load_spec

KTO = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, prompt: q, response: a, label: good}, max_tokens: 100}
batch: {micro_batch_tokens: 100}
actor: {model: {path: m}}
"""
PAIRS = "--data.train.prompt=null --data.train.response=null --data.train.label=null"
PRECOMPUTE = "--reference_logprobs.precompute=true --reference_logprobs.path="

# (flags that contradict, the key that is told, exit code, the flags instead)
CASES = [
    ("--data.train.label=null", "data.train.label", 2, "--data.train.label=other"),
    ("--data.train.response=null", "data.train.prompt", 2, "--data.train.response=b"),
    ("--data.train.messages=m", "data.train.messages", 2, "--data.train.messages=null"),
    ("--data.train.chosen=c", "data.train.chosen", 2, "--data.train.chosen=null"),
    ("--data.train.text=t", "data.train.text", 2, "--data.train.text=null"),
    (
        f"{PAIRS} --data.train.chosen=c",
        "data.train.rejected",
        2,
        f"{PAIRS} --data.train.chosen=c --data.train.rejected=r",
    ),
    (
        f"{PAIRS} --data.train.chosen=c --data.train.rejected=r --data.train.margin=m",
        "data.train.margin",
        2,
        f"{PAIRS} --data.train.chosen=c --data.train.rejected=r",
    ),
    ("--batch.sequences=1", "batch.sequences", 2, "--batch.sequences=2"),
    (
        "--data.max_tokens=101",
        "batch.micro_batch_tokens",
        4,
        "--data.max_tokens=101 --batch.micro_batch_tokens=101",
    ),
    (
        "--reference_logprobs.path=x.parquet",
        "reference_logprobs.path",
        4,
        f"{PRECOMPUTE}x.parquet",
    ),
    (f"{PRECOMPUTE}x.pt", "reference_logprobs.path", 2, f"{PRECOMPUTE}x.parquet"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "kto.yaml"
    file.write_text(KTO)
    return file


@pytest.mark.parametrize(("flags", "key", "code", "mend"), CASES)
def test_a_contradiction_is_refused_and_can_be_mended(
    path: Path, flags: str, key: str, code: int, mend: str
) -> None:
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        load_spec(JOBS["kto"], str(path), flags.split())
    report = str(caught.value)
    assert report.startswith(f"1 problem in the settings\n  {key}"), report
    assert caught.value.exit_code == code
    known = tuple(keys_of(KtoConfig))
    for named in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", report.replace(str(path), "")):
        assert find_key(known, tuple(named.split("."))) or named.startswith("x."), named
    load_spec(JOBS["kto"], str(path), mend.split())


def test_options_are_laid_over_the_default_loss(path: Path) -> None:
    flags = ["--algorithm.loss.options.undesirable_weight=0.5"]
    loss = load_spec(JOBS["kto"], str(path), flags).config.algorithm.loss
    assert (loss.name, loss.options) == ("kto", {"beta": 0.1, "undesirable_weight": 0.5})


def test_keys_tell_labels_from_pairs_and_pairs_are_asked_which_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    compared = "reference: {model: {path: m}}\n"
    file.write_text(KTO + compared)
    assert isinstance(load_any(str(file)).config, KtoConfig)
    pairs = KTO.replace("response: a, label: good", "chosen: a, rejected: b")
    file.write_text(pairs.replace("tokens: 100}", "tokens: 200}") + compared)
    with pytest.raises(ConfigError, match="could be a config for dpo or kto"):
        load_any(str(file))
    file.write_text("# dpo\n" + file.read_text().replace("max_tokens: 200", "max_tokens: 100"))
    assert isinstance(load_any(str(file)).config, DpoConfig)
