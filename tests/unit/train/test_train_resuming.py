"""What is said of a run that goes on with other settings, and of the disk that it has already."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.config.problems import show
from plimsoll.run.directory import RunDirectory
from plimsoll.train.resuming import changed_settings


def test_changed_settings_are_told_by_their_keys() -> None:
    before = """\
# sft
run: {steps: 6, resume: never, best: null}
data: {train: {path: a.jsonl}, template: "x\\ny"}
actor: {adapter: {rank: 4, targets: [q, v]}, ema: {decay: 0.9}}
"""
    now = """\
# sft
run: {steps: 8, resume: auto, best: null}
data: {train: {path: b.jsonl}, template: "x\\nz"}
actor: {adapter: {rank: 4, targets: [q]}, ema: null}
"""
    assert changed_settings(before, now) == [
        "run.steps: 6 -> 8",
        "data.train.path: a.jsonl -> b.jsonl",
        'data.template: "x\\ny" -> "x\\nz"',
        "actor.adapter.targets: [q, v] -> [q]",
        "actor.ema: not given -> null",
        "actor.ema.decay: 0.9 -> not given",
    ]
    assert changed_settings(before, before.replace("never", "auto")) == []


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
