"""Messages of a run that resumes with other settings, and on the disk space that it has already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import validate
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs.sft import SftConfig
from plimsoll.run.directory import RunDirectory
from plimsoll.run.state import SavedFile, measure_file, other_contents, write_manifest
from plimsoll.train.checkpoints import Checkpoints
from plimsoll.train.saving import changed_settings
from plimsoll.trainer.checkpoint import share_of

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


class Ranks:
    """Ranks of one role that compare files, one after the other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.shares: list[list[str]] = []

    def all(self, task: object, directory: Path, files: Sequence[SavedFile]) -> list[list[str]]:
        shares = [share_of(files, rank, self.ranks) for rank in range(self.ranks)]
        self.shares = [[file.name for file in share] for share in shares]
        return [other_contents(directory, share) for share in shares]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (2, [["form", "rank-00000-00000", "rank-00000-00001"], ["rank-00001-00000"]]),
        (1, [["form", "rank-00000-00000", "rank-00000-00001", "rank-00001-00000"]]),
        (3, [["form", "rank-00001-00000"], ["rank-00000-00000"], ["rank-00000-00001"]]),
    ],
)
def test_each_file_of_a_role_is_compared_by_one_rank(
    ranks: int, shares: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If as many ranks wrote them, by the one that wrote it; what differs is named."""
    names = [*dict.fromkeys(name for share in shares for name in share)]
    (tmp_path / "actor").mkdir()
    for name in ("state.json", *(f"actor/{name}" for name in names)):
        (tmp_path / name).write_text(name)
    files = [measure_file(tmp_path, f"actor/{name}") for name in names]
    write_manifest(tmp_path, [*files, measure_file(tmp_path, "state.json")])
    group: Any = Ranks(ranks)
    monkeypatch.setattr("plimsoll.train.checkpoints.group_of", lambda cluster, role: group)
    roles = {"actor": SimpleNamespace(name="actor", trained=True)}
    spec: Any = SimpleNamespace(run=None, roles=roles)
    checkpoints = Checkpoints(spec, RunDirectory(tmp_path), 0, None)
    assert checkpoints.find_damage(group, tmp_path) == ""
    assert group.shares == shares
    damaged = tmp_path / "actor" / "rank-00001-00000"
    damaged.write_text(damaged.read_text().replace("1", "2", 1))
    found = checkpoints.find_damage(group, tmp_path)
    assert found.startswith("actor/rank-00001-00000 has the xxh3 checksum") and ";" not in found
    (tmp_path / "actor" / "form").unlink()
    assert checkpoints.find_damage(group, tmp_path).startswith("actor/form is missing")
