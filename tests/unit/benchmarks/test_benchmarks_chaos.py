"""Random faults: which are drawn, how runs are compared, and what the table says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fault_injection.grammar import parse_faults
from fault_injection.points import POINTS

from chaos.compare import compare_runs
from chaos.draw import (
    RANDOM_KINDS,
    Occasion,
    draw_fault,
    noting_faults,
    occasions_of,
)
from chaos.table import summary_text, table_text
from chaos.trial import StepWatch
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import DIRECTORY
from plimsoll.run.directory import RunDirectory

OCCASIONS = [
    *(Occasion("rank.backward", f"rank={rank}", call) for rank in (0, 1) for call in (1, 2, 3)),
    *(Occasion("checkpoint.file", "rank=0", call) for call in (1, 2)),
    Occasion("metrics.write", "controller", 1),
    Occasion("reward.call", "controller", 1),
]


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "faults"))


def test_each_kind_comes_in_its_turn_where_it_can_happen() -> None:
    drawn = [draw_fault(i, 0, RANDOM_KINDS, OCCASIONS) for i in range(len(RANDOM_KINDS) * 20)]
    faults = parse_faults(",".join(drawn))
    assert set(Counter(fault.kind for fault in faults).values()) == {20}
    assert {fault.point.name for fault in faults} == {o.point for o in OCCASIONS}
    assert all(fault.kind in fault.point.kinds for fault in faults)
    assert all("once" in fault.conditions and "call" in fault.conditions for fault in faults)


def test_a_seed_draws_the_same_faults_again() -> None:
    def draws(seed: int) -> list[str]:
        return [draw_fault(i, seed, ["kill", "oom"], OCCASIONS) for i in range(20)]

    assert draws(1) == draws(1) != draws(2)


def test_a_kind_without_an_occasion_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torn.*checkpoint\.file"):
        draw_fault(0, 0, ["torn"], [Occasion("rank.step", "rank=0", 1)])


def test_the_undisturbed_run_notes_every_point() -> None:
    noted = parse_faults(noting_faults())
    assert [fault.point.name for fault in noted] == [*POINTS]
    row = {"fault": "rank.step:note", "process": "rank=1", "call": 3, "step": None}
    (occasion,) = occasions_of([row])
    assert occasion.fault("kill") == "rank.step:kill:call=3+rank=1+once"
    assert Occasion("rows.read", "controller", 2).fault("error") == "rows.read:error:call=2+once"


def write_run(path: Path, steps: int = 3, **changes: Any) -> Path:
    """A run with samples and a model; changes: a metric, a token, or a weight other than usual."""
    run = RunDirectory(path)
    path.mkdir()
    rows = [
        {"step": step, "reward": step / 2, "seconds/rollout": hash((path, step)) % 100}
        for step in range(1, steps + 1)
    ]
    rows[-1] |= changes.get("metrics", {})
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(1, steps + 1):
        tokens = [[step, changes.get("token", 7)], [step]]
        columns = {"group": [0, 1], "sample_index": [0, 0], "tokens": tokens, "parts": [[1.0]] * 2}
        run.trajectories_path(step).parent.mkdir(exist_ok=True)
        parquet.write_table(pa.table(columns), run.trajectories_path(step))
    run.model_path.mkdir()
    (run.model_path / "model.safetensors").write_bytes(changes.get("weights", b"weights"))
    return path


def test_equal_runs_differ_in_their_seconds_alone(tmp_path: Path) -> None:
    assert compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b")).is_equal


@pytest.mark.parametrize(
    ("changes", "what", "text"),
    [
        ({"metrics": {"reward": 0.75}}, "metrics", "step 3: reward 0.75, not 1.5"),
        ({"metrics": {"kl": 0.5}}, "metrics", "step 3: kl 0.5, not None"),
        ({"token": 8}, "samples", "step 1"),
        ({"weights": b"weight5"}, "weights", "model.safetensors"),
        ({"steps": 2}, "steps", "missing [3]"),
        ({"steps": 2}, "samples", "step 3 is missing"),
        ({"steps": 4}, "samples", "step 4 is too many"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, changes: dict[str, Any], what: str, text: str
) -> None:
    likeness = compare_runs(write_run(tmp_path / "a", **changes), write_run(tmp_path / "b"))
    assert getattr(likeness, what) == text and not likeness.is_equal


def test_steps_that_come_twice_and_models_that_are_missing_are_named(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward": 1.0}\n')
    (run / "model" / "model.safetensors").unlink()
    likeness = compare_runs(run, other)
    assert likeness.steps == "twice [2]" and likeness.weights == "model.safetensors is missing"


def test_a_broken_file_is_named_and_ends_nothing(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (run / "metrics.jsonl").write_text('{"step": 1\n')
    assert "metrics.jsonl" in compare_runs(run, other).steps


def test_recovery_lasts_until_a_step_that_was_not_done_before(tmp_path: Path) -> None:
    watch = StepWatch(RunDirectory(tmp_path), [(10.0, 1), (11.0, 2), (30.0, 3)])
    assert watch.seconds_to_recover(11.5, 31.0) == 18.5
    assert watch.seconds_to_recover(30.5, 31.0) == 0.5
    assert watch.seconds_to_recover(30.5, None) is None


def test_only_new_steps_are_seen(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    watch = StepWatch(run)
    for steps in (0, 1, 2, 1, 2, 3):
        run.metrics_path.write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(steps)))
        watch.look()
    assert [step for _, step in watch.seen] == [1, 2, 3]


def row(number: int, fault: str, **changes: Any) -> dict[str, Any]:
    fired = [{"fault": fault, "process": "rank=1", "time": 0.0, "seconds": 12.0 + number}]
    differs = {"steps": "", "samples": "", "metrics": "", "weights": ""}
    usual = {"starts": 1, "code": 0, "left": [], "seconds": 60.0, "differs": differs}
    return {"number": number, "faults": fault, "fired": fired} | usual | changes


def test_tables_count_each_kind() -> None:
    rows = [
        row(0, "rank.step:kill:call=1+once"),
        row(1, "rank.step:kill:call=2+once", starts=2),
        row(2, "rank.step:delay=3:once", code=None, left=["ray (7)"]),
        row(3, "rank.forward:wrong:once", differs={"metrics": "step 3: loss 1, not 2"}),
    ]
    table = table_text(rows).splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == ["0", "1", "2", "3"]
    assert "no (hung)" in table[3] and "metrics: step 3: loss 1, not 2" in table[4]
    counted = {line.split()[0]: line.split()[1:] for line in summary_text(rows).splitlines()[1:]}
    assert counted["kill"] == ["2", "2", "1", "2", "12.5", "13.0", "0"]
    assert counted["delay"] == ["1", "0", "0", "0", "14.0", "14.0", "1"]
    assert counted["wrong"] == ["1", "1", "1", "0", "15.0", "15.0", "0"]
