"""The report of a run directory: its text, its page, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.commands.report import report_run, table_text
from plimsoll.commands.run import leave_report
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.page.ledger import Comparison
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import whole_directory, write_whole
from plimsoll.run.json_lines import append_row
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.readings import Footprint, Line
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import write_trajectories

GB = 10**9
TABLE = """\
process        phase         memory    predicted  measured    over   seconds
rank 0         load          host                     2 GB               1.2
rank 1         train_actor   host           4 GB      5 GB    +25%       2.5
node 0         train_actor   host           8 GB      8 GB     +0%       2.5"""


def row(
    step: int,
    phase: str,
    process: str,
    measured: int,
    predicted: int | None = None,
    card: int | None = None,
) -> LedgerRow:
    on_card = (card // 4, card // 2, card) if card else ()
    held = Footprint(measured, *on_card)
    return LedgerRow(
        step=step,
        phase=phase,
        process=process,
        node="node 0",
        predicted=None if predicted is None else Footprint(predicted),
        measured=held,
        held=held,
        line=Line(6 * GB, 10 * GB),
        seconds=1.25,
    )


def run_of(path: Path, *rows: LedgerRow) -> RunDirectory:
    run = RunDirectory(path)
    write_ledger(run.ledger_path, rows)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two ranks on a node."""
    return run_of(
        tmp_path,
        row(1, "load", "rank 0", 2 * GB),
        row(1, "load", "rank 1", 1 * GB),
        row(1, "train_actor", "rank 0", 3 * GB, 4 * GB),
        row(1, "train_actor", "rank 1", 5 * GB, 4 * GB),
        row(1, "train_actor", "node 0", 8 * GB, 8 * GB),
        row(2, "train_actor", "rank 0", 4 * GB, 4 * GB),
        row(2, "train_actor", "rank 1", 3 * GB, 4 * GB),
        row(2, "train_actor", "node 0", 7 * GB, 8 * GB),
    )


@pytest.fixture
def local(tmp_path: Path) -> RunDirectory:
    """One process."""
    return run_of(
        tmp_path,
        *(row(1, phase, who, GB) for phase in ("data", "load") for who in ("local", "node 0")),
    )


class Elements(HTMLParser):
    """The elements of a page by their tags, with attributes and the text within."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def page_of(run: RunDirectory) -> dict[str, Any]:
    """Return what the page that a report writes has to show."""
    report_run(run.path)
    elements = Elements(run.report_path.read_text()).found
    (data,) = [text for _, attributes, text in elements if attributes.get("id") == "data"]
    found: dict[str, Any] = json.loads(data)
    return found


def titles(page: dict[str, Any], section: str) -> list[str]:
    return [panel["title"] for panel in page[f"curves?section={section}"]]


def trajectory(reward: float, prompt: str, response: str) -> Trajectory:
    return single_turn(
        prompt=Prompt(0, np.array([1, 2]), prompt, None),
        sample_index=0,
        response_tokens=np.array([3]),
        sampler_logprobs=np.zeros(1, dtype=np.float32),
        response_text=response,
        finish_reason="stop",
        weight_version=1,
        rewards=(RewardPart("right", reward, 2.0),),
    )


def test_the_text_has_a_line_a_phase_and_names_what_is_nearest(run: RunDirectory) -> None:
    text = report_run(run.path)
    table, _, rest = text.partition("\n\n")
    assert table == TABLE
    assert re.search(r"\bledger\.jsonl\b", rest) and str(run.report_path) in rest
    [nearest] = [line for line in rest.splitlines() if "rank 1 in train_actor, step 1" in line]
    assert re.findall(r"\d+(?: GB|%)", nearest) == ["8 GB", "10 GB", "80%", "6 GB"]


def test_a_run_of_one_process_has_no_second_row_for_its_node(local: RunDirectory) -> None:
    lines = report_run(local.path).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["local", "data"], ["local", "load"]]
    assert lines[3] == "" and "local in data, step 1" in lines[4]
    sizes = {"memory_bytes/local": 1e9, "memory_bytes/node": 1e9}
    append_row(local.metrics_path, {"step": 1, **sizes})
    page = page_of(local)
    assert {one["process"] for one in page["memory?run=0"]["table"]} == {"local"}
    (panel,) = page["curves?section=memory"]
    assert [one["name"] for one in panel["series"]] == ["local"]


def test_seconds_are_those_of_all_steps_and_leaks_are_told(run: RunDirectory) -> None:
    """The ledger has the steps in which a maximum moved; a last save is there alone."""
    for step in (1, 2, 3):
        append_row(run.metrics_path, {"step": step, "seconds/train_actor": 20.0})
    leak = {"process": "rank 1", "phase": "train_actor", "where": "host", "rate": 1e6}
    append_row(run.leaks_path, {"step": 2, **leak, "steps_left": 90})
    lines = report_run(run.path).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["1.2", "60.0", "60.0"]
    [told] = [line for line in lines if line.startswith("Leak: ")]
    assert "rank 1 holds 1 MB more host memory" in told and "about 90 steps" in told


def test_the_table_keeps_to_80_columns() -> None:
    wide = Comparison("critic rank 127", "train_critic", "allocated", 99 * GB, 999 * GB, 123456.7)
    assert max(map(len, table_text([wide]).splitlines())) <= 80


def test_the_page_has_what_was_learned_and_what_it_took(run: RunDirectory) -> None:
    run.write_config("# ppo\nrun: {steps: 3}\nactor: {model: {path: models/one}}\n")
    append_row(
        run.metrics_path, {"step": 0, "eval/reward": 0.5, "seconds/load": 3.0, "seconds/eval": 1.0}
    )
    last = {"reward": 1.0, "seconds/train_actor": 1.0, "memory_bytes/rank": 5e9}
    append_row(run.metrics_path, {"step": 1, **last})
    write_trajectories(run.trajectories_path(1), 1, [trajectory(1.0, "1+1=", "2")])
    write_whole(run.plan_path, "{}")
    page = page_of(run)
    (progress,) = page["progress"]
    assert {name: progress[name] for name in ("job", "model", "step", "steps", "seconds")} == {
        **{"job": "ppo", "model": "models/one", "step": 1, "steps": 3, "seconds": 5.0}
    }
    assert titles(page, "learning") == ["Reward"]
    assert titles(page, "time") == ["Time of a step by phase"]
    assert titles(page, "memory") == ["Memory at its fullest"]
    assert [one["prompt"] for one in page["groups?run=0"]["groups"]] == ["1+1="]
    assert "rank 1 in train_actor, step 1" in page["memory?run=0"]["remarks"][-1]


def test_memory_has_a_row_for_each_role_and_phase(run: RunDirectory) -> None:
    assert page_of(run)["memory?run=0"]["table"] == [
        {"process": who, "phase": phase, "several": several, "measures": {"host": host}}
        for who, phase, several, host in (
            ("rank 0", "load", 2, [None, 2 * GB, None]),
            ("rank 1", "train_actor", 2, [4 * GB, 5 * GB, 0.25]),
            ("node 0", "train_actor", 1, [8 * GB, 8 * GB, 0.0]),
        )
    ]


def test_a_card_has_all_its_numbers(tmp_path: Path) -> None:
    page = page_of(
        run_of(
            tmp_path,
            row(1, "load", "controller", 2 * GB, GB),
            row(1, "load", "rank 0", 3 * GB, card=8 * GB),
            row(1, "load", "node 0", 5 * GB),
        )
    )
    found = {one["process"]: one["measures"] for one in page["memory?run=0"]["table"]}
    assert found == {
        "controller": {"host": [GB, 2 * GB, 1.0]},
        "rank 0": {
            "host": [None, 3 * GB, None],
            "allocated": [None, 2 * GB, None],
            "reserved": [None, 4 * GB, None],
            "device": [None, 8 * GB, None],
        },
        "node 0": {"host": [None, 5 * GB, None]},
    }


def test_held_out_figures_are_numbers_with_their_intervals_and_units(run: RunDirectory) -> None:
    run.write_config("# dpo\nrun: {steps: 9, best: {metric: eval/loss}}\n")
    for step, accuracy in ((2, 0.5), (4, 0.75), (6, 0.625)):
        bounds = {"eval/accuracy_low": accuracy - 0.25, "eval/accuracy_high": accuracy + 0.25}
        append_row(
            run.metrics_path, {"step": step, "eval/accuracy": accuracy, "eval/nll": 2.0} | bounds
        )
    state = RunState(6, 0, 0, 0, 0.0, 0.0, best=0.75, best_step=4)
    with whole_directory(run.checkpoint_path(6)) as partial:
        state.save(partial / "state.json")
    found = page_of(run)["held-out?run=0"]
    assert found["columns"] == ["first, step 2", "best, step 4", "last, step 6"]
    cells = [["0.5", "0.25 to 0.75"], ["0.75", "0.5 to 1"], ["0.625", "0.375 to 0.875"]]
    label = "Accuracy, share of pairs"
    assert found["rows"] == [
        {"name": "eval/accuracy", "label": label, "cells": cells},
        {"name": "eval/nll", "label": "", "cells": [["2", ""]] * 3},
    ]


def test_seconds_of_loading_are_apart_from_those_of_steps(run: RunDirectory) -> None:
    for step in (1, 2):
        seconds = {"seconds/load": 60.0 / step, "seconds/rollout": 3.0, "seconds/sync": 1.0}
        append_row(run.metrics_path, {"step": step, **seconds})
    page = page_of(run)
    assert page["seconds?run=0"] == {"before": {"load": 90.0}, "steps": {"rollout": 6, "sync": 2}}
    panel = page["curves?section=time"][0]
    assert [one["label"] for one in panel["series"]] == ["rollout", "sync"]
    assert panel["unit"] == "seconds" and panel["tables"][0]["y"] == [[3, 3], [1, 1]]


def test_texts_of_a_run_are_escaped(run: RunDirectory) -> None:
    attack = "<script>alert('&')</script>"
    run.write_config(f'# ppo\nrun: {{steps: 1}}\nactor: {{model: {{path: "{attack}"}}}}\n')
    append_row(
        run.metrics_path,
        {"step": 1, f"eval/{attack}": 1.0, f"seconds/{attack}": 1.0, "reward": 1.0},
    )
    write_trajectories(run.trajectories_path(1), 1, [trajectory(0.5, attack, f"{attack} 2")])
    page = page_of(run)
    (response,) = page["group?run=0&step=1&group=0"]["responses"]
    assert response["branches"][0][0]["pieces"] == [[f"{attack} 2", None]]
    assert page["progress"][0]["model"] == attack
    text = run.report_path.read_text()
    scripts = [attributes for tag, attributes, _ in Elements(text).found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}, {"type": "module"}]
    assert "<script>alert" not in text and "&lt;script" not in text


def test_the_policy_allows_the_pages_own_scripts_and_no_other(run: RunDirectory) -> None:
    report_run(run.path)
    text = run.report_path.read_text()
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, re.S)
    assert len(scripts) == 2
    (policy,) = [a["content"] for _, a, _ in Elements(text).found if "http-equiv" in a]
    assert policy is not None and "connect-src 'none'" in policy and "unsafe" not in policy
    hashes = [b64encode(sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    assert f"default-src 'none'; script-src {allowed};" in policy


def test_the_page_needs_no_network(run: RunDirectory) -> None:
    run.write_config("# rm\nrun: {steps: 1}\n")
    append_row(run.metrics_path, {"step": 1, "loss": 2.0, "seconds/train_actor": 1.0})
    run.calibration_path.write_text("<svg/>")
    pictures = page_of(run)["pictures?run=0"]
    assert [one["source"].partition(",")[0] for one in pictures] == ["data:image/svg+xml;base64"]
    text = run.report_path.read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#)|@import|<link|url\((?!#)', text)


def test_a_run_without_metrics_config_or_plan_is_reported_too(run: RunDirectory) -> None:
    page = page_of(run)
    (progress,) = page["progress"]
    assert (progress["job"], progress["step"], progress["state"]) == (None, 0, "stopped")
    assert titles(page, "learning") == titles(page, "time") == page["settings"] == []


def test_a_report_imports_no_torch(run: RunDirectory) -> None:
    run.write_config("# ppo\nrun: {steps: 1}\n")
    last = {"reward": 1.0, "seconds/train_actor": 1.0, "memory_bytes/rank": 5e9}
    append_row(run.metrics_path, {"step": 1, **last})
    write_trajectories(run.trajectories_path(1), 1, [trajectory(1.0, "a", "b")])
    program = """
import sys
from pathlib import Path
from plimsoll.commands.report import report_run
report_run(Path(sys.argv[1]))
print("torch" in sys.modules)
"""
    words = [sys.executable, "-c", program, str(run.path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    leave_report(run.path)
    assert run.report_path.is_file() and capfd.readouterr().err == ""
    run.ledger_path.unlink()
    leave_report(run.path)
    assert re.match(r"no report\.html, .*: .*ledger\.jsonl", capfd.readouterr().err)


def test_a_fault_of_the_report_does_not_fail_the_run(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> str:
        raise ValueError("-inf + inf in fsum")

    monkeypatch.setattr("plimsoll.commands.report.report_run", fail)
    leave_report(run.path)
    assert re.match(r"no report\.html, .*: ValueError\('-inf \+ inf", capfd.readouterr().err)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone is no directory"):
        report_run(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"ledger\.jsonl is not there"):
        report_run(tmp_path)
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(ConfigError, match=r"ledger\.jsonl has no rows yet"):
        report_run(tmp_path)


def test_a_broken_line_leaves_the_old_report(run: RunDirectory) -> None:
    report_run(run.path)
    before = run.report_path.read_bytes()
    with run.ledger_path.open("a") as file:
        file.write('{"step": 3}\n')
    with pytest.raises(PlimsollError, match=r"ledger\.jsonl, line 9: "):
        report_run(run.path)
    assert run.report_path.read_bytes() == before


def test_a_run_that_failed_says_why_before_its_table(tmp_path: Path) -> None:
    rows = [row(1, "rollout", process, GB) for process in ("local", "node 0")]
    run = run_of(tmp_path, *rows)
    assert report_run(tmp_path).startswith("process ")
    run.end_path.write_text(json.dumps({"how": "failed", "why": "no disk", "at": 1.0}))
    failed = f"The run failed: no disk\nIts log, with the traceback: {tmp_path}/run.log\n"
    assert report_run(tmp_path).startswith(f"{failed}process ")
    assert '"failed: no disk"' in run.report_path.read_text()
    run.ledger_path.unlink()
    with pytest.raises(ConfigError, match="no step of the run has ended .*\n" + failed.strip()):
        report_run(tmp_path)
