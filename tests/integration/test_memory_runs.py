"""benchmarks/memory_runs.py, as its users run it: small real runs stay near their plan."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = re.compile(r"^(?P<run>.+?) +(?P<process>local|tensors) .* (?P<error>-?\d+\.\d)%$", re.M)

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def errors(
    shown: Captured, patch: pytest.MonkeyPatch, *options: str
) -> dict[tuple[str, str], float]:
    """Return the errors of the prediction in per cent, by run and process."""
    import memory_runs

    patch.setattr(sys, "argv", ["memory_runs.py", *options])
    assert memory_runs.main() == 0
    found = ROW.finditer(shown.readouterr().out)
    return {(m["run"], m["process"]): float(m["error"]) for m in found}


@pytest.mark.slow
def test_processes_stay_near_the_plan(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_ledger_runs.py does the same for larger models, phase by phase."""
    options = ("--only", "3m ZeRO-2", "--folder", str(tmp_path))
    found = errors(capsys, monkeypatch, *options)
    assert set(found) == {("sft 3m ZeRO-2, fp32", "local"), ("dpo 3m ZeRO-2", "local")}
    assert all(abs(error) < 20 for error in found.values()), found


def test_tensors_stay_near_the_plan(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--tensors", "--only", "sft 3m ZeRO-0", "--folder", str(tmp_path))
    found = errors(capsys, monkeypatch, *options)
    assert set(found) == {("sft 3m ZeRO-0", "tensors")}
    assert all(abs(error) < 10 for error in found.values()), found
