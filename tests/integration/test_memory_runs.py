"""benchmarks/memory_runs.py, as its users run it: small real runs stay near their plan."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_runs.py"
ROW = re.compile(r"^(?P<run>.+?) +(?P<process>local|tensors) .* (?P<error>-?\d+\.\d)%$", re.M)


def errors(*options: str) -> dict[tuple[str, str], float]:
    """Of the prediction in per cent, by run and process."""
    command = [sys.executable, str(BENCHMARK), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {(m["run"], m["process"]): float(m["error"]) for m in ROW.finditer(done.stdout)}


def test_processes_stay_near_the_plan(tmp_path: Path) -> None:
    found = errors("--only", "3m ZeRO-2", "--folder", str(tmp_path))
    assert set(found) == {("sft 3m ZeRO-2, fp32", "local"), ("dpo 3m ZeRO-2", "local")}
    assert all(abs(error) < 20 for error in found.values()), found


def test_tensors_stay_near_the_plan(tmp_path: Path) -> None:
    found = errors("--tensors", "--only", "sft 3m ZeRO-0", "--folder", str(tmp_path))
    assert set(found) == {("sft 3m ZeRO-0", "tensors")}
    assert all(abs(error) < 10 for error in found.values()), found
