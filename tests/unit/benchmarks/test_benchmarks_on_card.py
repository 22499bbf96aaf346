"""benchmarks/on_card.py without a card: its order, its rows, and what a failure leaves."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from on_card import (
    CASES,
    FIRST,
    Bench,
    Row,
    _finished,
    _run,
    make_rows,
    run_all,
    run_case,
    tries,
    write_config,
)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a bench on the CPU with time for all."""
    return Bench(tmp_path, "cpu", "cpu", True, None, 1e12, time.monotonic() + 10_000)


def test_the_process_that_starts_the_runs_never_loads_torch() -> None:
    """It must hold nothing on the card beside the runs."""
    program = "import sys, on_card; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, check=False)
    assert done.returncode == 0


def test_plimsoll_runs_the_first_cases_before_trl_does_and_both_before_the_others(
    bench: Bench,
) -> None:
    beside = tries(CASES, replace(bench, trl="somewhere"))
    count = len(FIRST)
    assert beside[:count] == [(case, "Plimsoll") for case in FIRST]
    assert beside[count : 2 * count] == [(case, "TRL") for case in FIRST]
    assert ("grpo-7b-merged", "Plimsoll") in beside and ("grpo-7b-merged", "TRL") not in beside
    assert tries(["grpo-7b"], bench) == [("grpo-7b", "Plimsoll"), ("grpo-7b-merged", "Plimsoll")]
    assert {case for case, _ in tries(CASES, bench)} == set(CASES)


def row(case: str, who: str, bench: Bench) -> Row:
    """Return a row of a case that ran."""
    return Row(case, who, bench.name, 100.0, 0.5, 2.0, {"local": (1.0, 1.1)}, {"save": 0.5})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("exit code 1: no kernel image"),
        FileNotFoundError("metrics.jsonl"),
        statistics.StatisticsError("no median for empty data"),
        KeyError("tokens_per_second"),
    ],
)
def test_a_case_that_fails_leaves_its_error_and_the_next_one_runs(
    error: Exception, bench: Bench
) -> None:
    def run(case: str, who: str, bench: Bench) -> Row:
        if case == "dpo-0.5b":
            raise error
        return row(case, who, bench)

    rows = list(run_all([(case, "Plimsoll") for case in FIRST], bench, run))
    assert [each.case for each in rows] == list(FIRST)
    assert [each.case for each in rows if each.failed] == ["dpo-0.5b"]
    assert type(error).__name__ in rows[1].failed and str(error) in str(rows[1])


def test_a_run_that_is_refused_leaves_what_it_wrote(bench: Bench) -> None:
    (bench.home / "model-0.5b").write_text("a file in the place of the model's directory")
    (refused,) = run_all([("sft-0.5b", "Plimsoll")], bench, run_case)
    assert "exit code 2: error: 1 problem" in refused.failed


def test_a_case_that_needs_more_time_than_is_left_is_not_begun(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """GRPO starts an engine; one of the others may still be done."""
    hurried = replace(bench, until=time.monotonic() + 40)
    wanted = [("grpo-0.5b", "Plimsoll"), ("sft-1.5b", "Plimsoll")]
    assert [each.case for each in run_all(wanted, hurried, row)] == ["sft-1.5b"]
    assert "grpo-0.5b, Plimsoll: too little time" in capsys.readouterr().err


def test_a_run_for_which_time_is_over_is_ended_with_its_processes(bench: Bench) -> None:
    child = "import subprocess, sys, time; "
    child += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])"
    with pytest.raises(RuntimeError, match="no time was left"):
        _run([sys.executable, "-c", child, str(bench.home)], "", time.monotonic() + 3)
    assert not [each for each in psutil.process_iter() if str(bench.home) in _words(each)]


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_what_failed_runs_again_and_what_ran_does_not(bench: Bench) -> None:
    assert _finished(None) == _finished(str(bench.home / "none.jsonl")) == set()
    lines = [
        {"case": "sft-0.5b", "who": "Plimsoll", "failed": ""},
        {"case": "dpo-0.5b", "who": "Plimsoll", "failed": "RuntimeError"},
    ]
    out = bench.home / "rows.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _finished(str(out)) == {("sft-0.5b", "Plimsoll")}


def test_a_row_says_what_was_measured_and_planned(bench: Bench) -> None:
    text = str(row("sft-0.5b", "Plimsoll", bench))
    assert "100 tokens/s  50.0%    2.00 s" in text and "local 1.00 of 1.10 GB planned" in text


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("grpo-0.5b", {"sleep_level": 2, "arguments": {"enforce_eager": True}}),
        ("grpo-0.5b-compiled", {"sleep_level": 2}),
        ("grpo-7b-merged", {"sleep_level": 2, "arguments": {"enforce_eager": True}}),
        (
            "grpo-7b",
            {"sleep_level": 1, "adapter": "separate", "arguments": {"enforce_eager": True}},
        ),
    ],
)
def test_engines_on_a_card_compile_only_where_the_case_says_so(
    case: str, settings: dict[str, object], bench: Bench
) -> None:
    on_card = replace(bench, device="cuda")
    job, size = case.split("-")[:2]
    config = write_config(case, job, size, bench.home / "model", on_card)
    rollout = yaml.safe_load(config.read_text())["rollout"]
    assert rollout["vllm"] == {"memory_share": 0.45, **settings}


def test_rows_are_enough_for_all_steps_and_short_enough(bench: Bench) -> None:
    make_rows(bench)
    rows = [json.loads(line) for line in (bench.home / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * bench.rows
    longest = max(len(row["prompt"]) + len(row[name]) for row in rows for name in row)
    assert longest < 512
