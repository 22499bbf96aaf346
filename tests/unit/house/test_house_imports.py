"""The rules of the house about imports, from pyproject.toml, and what may not need torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
ENGINES = ("torch", "ray", "deepspeed", "vllm", "transformers", "datasets")


def test_imports_point_downwards_and_engines_stay_in_their_rooms() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    words = [str(command), "--no-cache"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "plimsoll.config.load",
        "plimsoll.config.keys",
        "plimsoll.cli",
        "plimsoll.records",
        "plimsoll.commands.preflight",
        "plimsoll.commands.placement",
        "plimsoll.commands.doctor",
        "plimsoll.commands.report",
        "plimsoll.machine.hardware",
        "plimsoll.machine.versions",
        "plimsoll.run.directory",
    ],
)
def test_needs_no_engine(module: str) -> None:
    script = f"import sys, {module}; print(*[m for m in {ENGINES!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
