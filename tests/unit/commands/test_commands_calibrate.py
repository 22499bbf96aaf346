"""Constants fitted to ledgers that are made from known ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.commands.calibrate import calibrate
from plimsoll.errors import ConfigError
from plimsoll.memory.contents.overheads import Constants, constant_values, read_constants
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import write_whole
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.readings import Footprint, Line

MB = 10**6
SHIPPED = Constants()


def row(process: str, phase: str, predicted: Footprint | None, measured: Footprint) -> LedgerRow:
    return LedgerRow(1, phase, process, "node 0", predicted, measured, measured, Line(1, 2), 1.0)


def write_run(
    path: Path, rows: list[LedgerRow], constants: Constants = SHIPPED, engine: str = "vllm: {}"
) -> Path:
    run = RunDirectory(path)
    path.mkdir()
    run.write_config(f"rollout: {{{engine}}}")
    write_ledger(run.ledger_path, rows)
    write_whole(run.plan_path, json.dumps({"constants": constant_values(constants)}))
    return path


def on_cpu(path: Path, added: int, constants: Constants = SHIPPED) -> Path:
    """Ranks hold `added` bytes more than predicted, but in one phase; the controller 7 MB more."""
    rows = [
        row("controller", "load", Footprint(400 * MB), Footprint(407 * MB)),
        row("rank 0", "data", None, Footprint(1)),
        row("rank 0", "load", Footprint(500 * MB), Footprint(500 * MB + added)),
        row("rank 0", "score", Footprint(600 * MB), Footprint(600 * MB + added)),
        row("rank 1", "score", Footprint(600 * MB), Footprint(900 * MB)),
        row("node 0", "score", Footprint(1), Footprint(10**12)),
    ]
    return write_run(path, rows, constants)


def on_card(path: Path, gap: float, context: int) -> Path:
    """The card shows `context` more than predicted besides what torch reserved."""
    rows = []
    for allocated in (1000 * MB, 4000 * MB):
        reserved = round(allocated * (1 + gap))
        predicted = Footprint(3000 * MB, 900 * MB, 1000 * MB, 2000 * MB)
        measured = Footprint(3100 * MB, allocated, reserved, reserved + 1000 * MB + context)
        rows.append(row("rank 0", f"phase {allocated}", predicted, measured))
    return write_run(path, rows)


def fitted(tmp_path: Path, *runs: Path) -> dict[str, float]:
    calibrate(runs, tmp_path / "out.json")
    return {k: v["value"] for k, v in json.loads((tmp_path / "out.json").read_text()).items()}


def test_a_constant_moves_by_the_median_excess(tmp_path: Path) -> None:
    found = fitted(tmp_path, on_cpu(tmp_path / "a", 50 * MB))
    assert found == {
        "worker_process": SHIPPED.worker_process + 50 * MB,
        "controller_process": SHIPPED.controller_process + 7 * MB,
    }


def test_of_several_runs_the_median_counts(tmp_path: Path) -> None:
    runs = [on_cpu(tmp_path / str(n), n * MB) for n in (10, 20, 250)]
    assert fitted(tmp_path, *runs)["worker_process"] == SHIPPED.worker_process + 20 * MB


def test_a_run_that_was_planned_with_a_calibration_moves_that(tmp_path: Path) -> None:
    """What was calibrated and then met exactly stays."""
    earlier = SHIPPED.with_measured("here", worker_process=480 * MB)
    run = on_cpu(tmp_path / "a", 0, earlier)
    assert fitted(tmp_path, run)["worker_process"] == 480 * MB


def test_a_card_tells_of_context_gap_and_libraries(tmp_path: Path) -> None:
    found = fitted(tmp_path, on_card(tmp_path / "a", 0.08, 30 * MB))
    assert found == {
        "cuda_libraries": SHIPPED.cuda_libraries + 100 * MB,
        "cuda_context": SHIPPED.cuda_context + 30 * MB,
        "allocator_gap": 0.08,
    }


def test_engines_on_cpu_tell_of_vllm_where_they_ran_it(tmp_path: Path) -> None:
    rows = [
        row("engine 0", phase, Footprint(1800 * MB), Footprint(1900 * MB))
        for phase in ("load", "rollout")
    ]
    found = fitted(tmp_path, write_run(tmp_path / "a", rows))
    assert found == {"engine_process": SHIPPED.engine_process + 50 * MB}  # front and core
    divided = write_run(tmp_path / "c", rows, engine="vllm: {tensor_parallel: 2}")
    assert fitted(tmp_path, divided) == {"engine_process": SHIPPED.engine_process + 25 * MB}
    staged = write_run(tmp_path / "d", rows, engine="vllm: {pipeline_parallel: 2}")
    assert fitted(tmp_path, staged) == fitted(tmp_path, divided)
    other = write_run(tmp_path / "b", [*rows, rows[0]], engine="transformers: {}")
    with pytest.raises(ConfigError, match="no phase"):
        fitted(tmp_path, other)


def test_no_constant_becomes_negative(tmp_path: Path) -> None:
    assert (
        fitted(tmp_path, on_cpu(tmp_path / "a", -SHIPPED.worker_process - MB))["worker_process"]
        == 0
    )


def test_the_file_has_provenance_and_is_what_the_plan_reads(tmp_path: Path) -> None:
    text = calibrate([on_cpu(tmp_path / "a", 50 * MB)], tmp_path / "out.json")
    constants = read_constants(tmp_path / "out.json")
    assert constants.worker_process == SHIPPED.worker_process + 50 * MB
    assert constants.cuda_context == SHIPPED.cuda_context
    ((source, names),) = constants.calibrations().items()
    assert names == ["worker_process", "controller_process"]
    assert source.startswith("calibrated 2") and str(tmp_path / "a") in source
    assert "torch 2." in source and "Python 3." in source
    assert f"cluster.calibration: {tmp_path / 'out.json'}" in text
    assert "worker_process" in text and "from 3 readings" in text


def test_runs_without_predictions_are_refused(tmp_path: Path) -> None:
    silent = write_run(tmp_path / "a", [row("rank 0", "data", None, Footprint(1))])
    with pytest.raises(ConfigError, match="no phase"):
        calibrate([silent], tmp_path / "out.json")
    with pytest.raises(ConfigError, match="gone is no directory"):
        calibrate([tmp_path / "gone"], tmp_path / "out.json")
    (silent / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"plan\.json .*constants"):
        calibrate([silent], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
