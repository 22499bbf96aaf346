"""Runs that go on with rows that were edited, added or taken away in between."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Outcome, cut_off, metrics, run_here
from kto_cases import KTO, write_labelled

from plimsoll.run.state import RunState

STEPS = KTO["run"]["steps"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a whole run that saved after every step."""
    home = tmp_path_factory.mktemp("edited")
    write_labelled(home)
    saving = ("--run.save_every", "1", "--run.keep_checkpoints", str(STEPS))
    assert run_here(home, "kto", "kto.yaml", *saving).code == 0
    for name in ("rows", "pairs"):
        shutil.copy(home / f"{name}.jsonl", home / f"{name}-before.jsonl")
    return home


def edited(home: Path, name: str, change: Callable[[list[str]], list[str]]) -> None:
    """Write a file of rows anew, with this change of it as it was."""
    before = (home / f"{name}-before.jsonl").read_text().splitlines()
    (home / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in change(before)))


def go_on(home: Path, directory: str, *flags: str) -> Outcome:
    """From the second step's checkpoint, in a directory of its own."""
    shutil.rmtree(home / directory, ignore_errors=True)
    cut_off(home / "kto", home / directory, step=2)
    command = ("kto", "kto.yaml", "--run.directory", directory, "--run.resume", "must")
    done = run_here(home, *command, *flags)
    for name in ("rows", "pairs"):
        shutil.copy(home / f"{name}-before.jsonl", home / f"{name}.jsonl")
    return done


def with_label(line: str, good: bool) -> str:
    return json.dumps(json.loads(line) | {"good": good})


def other_label(lines: list[str]) -> list[str]:
    return [*lines[:-1], with_label(lines[-1], not json.loads(lines[-1])["good"])]


def test_an_edited_row_ends_the_run_with_the_file(home: Path) -> None:
    edited(home, "rows", other_label)
    refused = go_on(home, "one")
    assert refused.code == 2
    assert re.search(r"data\.train \(rows\.jsonl\) .* step 2\b", refused.err)
    assert "--run.edited_rows accept" in refused.err
    assert RunState.load(home / "one" / "checkpoints" / "step-000002" / "state.json").step == 2


def test_edited_rows_of_all_sources_are_reported_at_once(home: Path) -> None:
    edited(home, "rows", lambda lines: lines[::-1])
    edited(home, "pairs", lambda lines: [*lines[1:], lines[0]])
    refused = go_on(home, "both")
    assert refused.code == 2
    assert "data.train (rows.jsonl) " in refused.err
    assert "data.eval (pairs.jsonl) " in refused.err


def test_edited_rows_are_accepted_on_request(home: Path) -> None:
    edited(home, "rows", other_label)
    done = go_on(home, "accepted", "--run.edited_rows", "accept")
    assert done.code == 0
    assert re.search(r"data\.train \(rows\.jsonl\) .* step 2\b", done.out)
    last = RunState.load(home / "accepted" / "checkpoints" / f"step-{STEPS:06d}" / "state.json")
    first = RunState.load(home / "kto" / "checkpoints" / f"step-{STEPS:06d}" / "state.json")
    assert last.sources is not None and first.sources is not None
    assert last.sources["data.train"].content != first.sources["data.train"].content
    assert last.sources["data.eval"] == first.sources["data.eval"]


def test_the_same_rows_in_another_form_are_the_same(home: Path) -> None:
    """What is not read may change, and how rows are written."""
    edited(home, "rows", lambda lines: [json.dumps(json.loads(x) | {"more": 1}) for x in lines])
    assert go_on(home, "same").code == 0
    assert metrics(home / "same") == metrics(home / "kto")


def test_added_and_removed_rows_are_reported(home: Path) -> None:
    edited(home, "rows", lambda lines: [*lines, lines[0]])
    more = go_on(home, "more")
    assert more.code == 0 and re.search(r"data\.train .* 20 .* 21 ", more.out)
    edited(home, "rows", lambda lines: lines[:-1])
    fewer = go_on(home, "fewer")
    assert fewer.code == 0 and re.search(r"data\.train .* 20 .* 19 ", fewer.out)
    edited(home, "rows", lambda lines: [lines[-1], *lines])
    assert go_on(home, "before").code == 2  # the others are not where they were


def test_other_settings_of_the_data_are_taken_as_before(home: Path) -> None:
    done = go_on(home, "settings", "--data.train.limit", "12")
    assert done.code == 0
    assert "data.train.limit: null -> 12" in done.out


def test_a_checkpoint_of_an_older_version_goes_on(home: Path) -> None:
    cut_off(home / "kto", home / "old", step=2)
    state = home / "old" / "checkpoints" / "step-000002" / "state.json"
    values = json.loads(state.read_text())
    del values["sources"]
    state.write_text(json.dumps(values))
    flags = ("--run.directory", "old", "--run.resume", "must")
    assert run_here(home, "kto", "kto.yaml", *flags).code == 0
    assert metrics(home / "old") == metrics(home / "kto")
