"""The report of a run directory: its text, its page, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from plimsoll.commands.report.report import report_run, table_text
from plimsoll.commands.run import leave_report
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.page.comparison import Comparison
from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import whole_directory
from plimsoll.run.json_lines import append_row
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.readings import Footprint, Line
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import write_trajectories

GB = 10**9
SVG = "{http://www.w3.org/2000/svg}"


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


def page_of(run: RunDirectory) -> ElementTree.Element:
    """The body of the page that a report writes, `|` at line breaks; it has to be well-formed."""
    report_run(run.path)
    body = re.search(r"<body>.*</body>", run.report_path.read_text(), re.S)
    assert body is not None
    return ElementTree.fromstring(body[0].replace("<br />", "|"))


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def table(page: ElementTree.Element, name: str) -> list[list[str]]:
    found = page.findall(f".//table[@class='{name}']/tbody/tr")
    return [[words(cell) for cell in cells] for cells in found]


def headings(page: ElementTree.Element) -> list[str]:
    return [words(heading) for heading in page.findall("h2")]


def drawn(page: ElementTree.Element) -> list[str]:
    return [figure.get("aria-label", "") for figure in page.findall(".//figure")]


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
    lines = report_run(run.path).splitlines()
    assert lines[:4] == [
        "process        phase         memory    predicted  measured    over   seconds",
        "rank 0         load          host                     2 GB               1.2",
        "rank 1         train_actor   host           4 GB      5 GB    +25%       2.5",
        "node 0         train_actor   host           8 GB      8 GB     +0%       2.5",
    ]
    assert lines[5:] == [
        "Of several processes of a kind each phase's fullest; ledger.jsonl has all of them.",
        "Nearest the line: rank 1 in train_actor, step 1. The run held 8 GB of its node's 10 GB "
        "(80%); 6 GB were in use by all that ran there.",
        f"Written to {run.report_path}.",
    ]


def test_one_process_is_told_once(local: RunDirectory) -> None:
    lines = report_run(local.path).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["local", "data"], ["local", "load"]]
    assert lines[3] == "" and lines[4].startswith("Nearest the line: local in data, step 1.")
    append_row(
        local.metrics_path, {"step": 1, "memory_bytes/local": 1.0, "memory_bytes/node 0": 1.0}
    )
    assert "node 0" not in words(page_of(local))


def test_the_table_keeps_to_80_columns() -> None:
    wide = Comparison("critic rank 127", "train_critic", "allocated", 99 * GB, 999 * GB, 123456.7)
    assert max(map(len, table_text([wide]).splitlines())) <= 80


def test_what_was_learned_comes_first_and_memory_after_it(run: RunDirectory) -> None:
    run.write_config("# ppo\nrun: {steps: 3}\nactor: {model: {path: models/one}}\n")
    append_row(
        run.metrics_path, {"step": 0, "eval/reward": 0.5, "seconds/load": 3.0, "seconds/eval": 1.0}
    )
    append_row(run.metrics_path, {"step": 1, "reward": 1.0, "seconds/train_actor": 1.0})
    write_trajectories(run.trajectories_path(1), 1, [trajectory(1.0, "1+1=", "2")], None)
    run.write_plan("{}", "<svg/>")
    page = page_of(run)
    assert headings(page) == [
        *("Held out", "Curves", "Sampled responses of step 1", "Time"),
        *("Memory: predicted and measured", "The plan", "Config"),
    ]
    assert words(page[1]) == "plimsoll ppo of models/one; step 1 of 3; 0:00:05 in all"
    assert drawn(page) == ["Reward", "Time of a step by phase", "Memory at its fullest"]


def test_memory_has_a_row_for_each_role_and_phase(run: RunDirectory) -> None:
    assert table(page_of(run), "memory") == [
        ["rank 0 of 2", "load", "", "2 GB", ""],
        ["rank 1 of 2", "train_actor", "4 GB", "5 GB", "+25%"],
        ["node 0", "train_actor", "8 GB", "8 GB", "+0%"],
    ]


def test_a_card_comes_before_its_host_and_torchs_own_numbers_behind_a_click(
    tmp_path: Path,
) -> None:
    page = page_of(
        run_of(
            tmp_path,
            row(1, "load", "recipe", 2 * GB, GB),
            row(1, "load", "rank 0", 3 * GB, card=8 * GB),
            row(1, "load", "node 0", 5 * GB),
        )
    )
    groups = [
        [words(cell) for cell in page.findall(f".//{place}table/thead/tr/th[@class='group']")]
        for place in ("div[@class='wide']/", "details//")
    ]
    assert groups[1] == ["allocated", "reserved"] and groups[0][:2] == ["card", "host"]
    assert table(page, "memory") == [
        ["recipe", "load", "", "", "", "1 GB", "2 GB", "+100%"],
        ["rank 0", "load", "", "8 GB", "", "", "3 GB", ""],
        ["node 0", "load", "", "", "", "", "5 GB", ""],
        ["rank 0", "load", "", "2 GB", "", "", "4 GB", ""],
    ]


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
    page = page_of(run)
    columns = [words(cell) for cell in page.findall(".//table[@class='held-out']/thead/tr/th")]
    assert columns == ["metric", "first, step 2", "best, step 4", "last, step 6"]
    assert table(page, "held-out") == [
        [
            "eval/accuracy|Accuracy, share of pairs",
            *("0.5|0.25 to 0.75", "0.75|0.5 to 1", "0.625|0.375 to 0.875"),
        ],
        ["eval/nll", "2", "2", "2"],
    ]


def test_loading_is_told_beside_the_time_of_the_steps(run: RunDirectory) -> None:
    for step in (1, 2):
        seconds = {"seconds/load": 60.0 / step, "seconds/rollout": 3.0, "seconds/sync": 1.0}
        append_row(run.metrics_path, {"step": step, **seconds})
    page = page_of(run)
    assert "Before the first step, or on resuming: load 90.0 s." in words(page)
    assert table(page, "time") == [["rollout", "6.0", "75%"], ["sync", "2.0", "25%"]]
    (figure,) = page.findall(".//figure[@aria-label='Time of a step by phase']")
    shown = {text.text for text in figure.iter(f"{SVG}text")}
    assert {"rollout", "sync", "seconds"} <= shown and "load" not in shown


def test_texts_of_a_run_are_escaped(run: RunDirectory) -> None:
    attack = "<script>alert('&')</script>"
    run.write_config(f'# ppo\nrun: {{steps: 1}}\nactor: {{model: {{path: "{attack}"}}}}\n')
    append_row(
        run.metrics_path,
        {"step": 1, f"eval/{attack}": 1.0, f"seconds/{attack}": 1.0, "reward": 1.0},
    )
    write_trajectories(run.trajectories_path(1), 1, [trajectory(0.5, attack, f"{attack} 2")], None)
    page = page_of(run)
    (response,) = page.findall(".//article")
    assert [words(cell) for cell in response.iter("pre")] == [attack, f"{attack} 2"]
    assert [words(text) for text in response[:2]] == ["reward 1", "right 0.5"]
    assert attack in words(page[1]) and attack in table(page, "held-out")[0][0]
    assert "<script" not in run.report_path.read_text()


def test_the_page_needs_no_network(run: RunDirectory) -> None:
    run.write_config("# rm\nrun: {steps: 1}\n")
    append_row(run.metrics_path, {"step": 1, "loss": 2.0, "seconds/train_actor": 1.0})
    run.write_plan("{}", "<svg/>")
    run.calibration_path.write_bytes(b"PNG")
    pictures = [image.get("src", "") for image in page_of(run).iter("img")]
    assert [picture.partition(",")[0] for picture in pictures] == [
        "data:image/png;base64",
        "data:image/svg+xml;base64",
    ]
    text = run.report_path.read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#)|@import|<script|<link|url\((?!#)', text)


def test_a_run_without_metrics_config_or_plan_is_reported_too(run: RunDirectory) -> None:
    page = page_of(run)
    assert headings(page) == ["Held out", "Memory: predicted and measured", "Config"]
    assert words(page[1]).endswith("curves of its learning are left out; step 0; 0:00:00 in all")


def test_needs_no_torch(run: RunDirectory) -> None:
    run.write_config("# ppo\nrun: {steps: 1}\n")
    append_row(run.metrics_path, {"step": 1, "reward": 1.0, "seconds/train_actor": 1.0})
    write_trajectories(run.trajectories_path(1), 1, [trajectory(1.0, "a", "b")], None)
    program = """
import sys
from pathlib import Path
from plimsoll.commands.report.report import report_run
report_run(Path(sys.argv[1]))
print("torch" in sys.modules)
"""
    words = [sys.executable, "-c", program, str(run.path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_run_whose_report_cannot_be_written_ends_well_and_says_so(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    leave_report(run.path)
    assert run.report_path.is_file() and capfd.readouterr().err == ""
    run.ledger_path.unlink()
    leave_report(run.path)
    assert re.match(r"no report.html, .*: .*ledger\.jsonl is not there", capfd.readouterr().err)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(PlimsollError, match=r"ledger\.jsonl, line 9: no row of a ledger"):
        report_run(run.path)
    assert run.report_path.read_bytes() == before
