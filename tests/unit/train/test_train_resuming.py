"""Messages of a run that resumes with other settings, and on the disk space that it has already."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import validate
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs.sft import SftConfig
from plimsoll.run.directory import RunDirectory
from plimsoll.train.saving import changed_settings

OLD = """\
# sft
run: {directory: run, steps: 6, resume: never, tensorboard: true}
data:
  train: {path: a.jsonl, prompt: q, response: a}
  eval: null
  system: "x\\ny"
actor:
  model: {path: model}
  zero: {stage: 2}
  adapter: {rank: 4, targets: [q_proj, v_proj]}
  ema: {decay: 0.9}
"""
"""As a version wrote it that knew these keys and no others."""


def sft(*flags: str) -> SftConfig:
    """Return the config as this version reads it, with flags."""
    return validate(SftConfig, apply_flags(read_tree(OLD, "config.yaml"), parse_flags(flags)))


def test_changed_settings_are_listed_by_their_keys() -> None:
    paths = ("--run.directory=other", "--data.train.path=b.jsonl")
    values = ("--run.steps=8", '--data.system="x\\nz"', "--actor.adapter.targets=[q_proj]")
    assert changed_settings(OLD, sft(*paths, *values, "--actor.ema=null")) == [
        "run.directory: run -> other",
        "run.steps: 6 -> 8",
        "data.train.path: a.jsonl -> b.jsonl",
        'data.system: "x\\ny" -> "x\\nz"',
        "actor.adapter.targets: [q_proj, v_proj] -> [q_proj]",
        "actor.ema.decay: 0.9 -> not given",
    ]
    assert changed_settings(OLD, sft("--run.resume=auto", "--run.edited_rows=accept")) == []


def test_keys_that_an_older_version_did_not_have_are_listed_where_they_are_set() -> None:
    assert changed_settings(OLD, sft()) == []
    changes = changed_settings(OLD, sft("--batch.sequences=4", "--actor.optimizer.beta1=0.9"))
    assert changes == ["batch.sequences: not given -> 4"]  # 0.9 is beta1's default


def test_a_new_section_of_defaults_is_listed() -> None:
    """The older version may know the section (`data.eval`) or not (`run.best`)."""
    held_out = changed_settings(OLD, sft("--data.eval={path: c.jsonl, text: d}"))
    assert {"data.eval: null -> not given", "data.eval.split: not given -> train"} < {*held_out}
    assert "run.best.goal: not given -> lowest" in changed_settings(OLD, sft("--run.best={}"))


def test_a_text_with_line_breaks_is_shown_with_them() -> None:
    assert show("\n") == '"\\n"'
    assert show("a b") == "a b"


def test_what_a_run_has_saved_is_counted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.saved_bytes() == 0
    for file, size in (
        (run.checkpoint_path(3) / "actor" / "rank.safetensors", 1000),
        (run.checkpoint_path(3).with_name(".step-000004.partial-x") / "rank.safetensors", 70),
        (run.model_path / "model.safetensors", 200),
        (run.metrics_path, 30),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))
    assert run.saved_bytes() == 1200
