"""The package as people install it: a wheel, in an environment of its own, by plain pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_the_wheel_installs_and_plays_the_demo(tmp_path: Path) -> None:
    def run(*words: str | Path, cwd: Path = tmp_path) -> None:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    wheels, own = tmp_path / "wheels", tmp_path / "env" / "bin"
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ".")
    run(sys.executable, "-m", "pip", *build, cwd=ROOT)
    [wheel] = wheels.iterdir()
    run(sys.executable, "-m", "venv", "env")
    run(own / "pip", "install", "--quiet", f"{wheel}[cpu]")
    run(own / "plimsoll", "setup-vllm", "--backend", "cpu")
    run(own / "plimsoll", "demo")
    assert (tmp_path / "runs" / "demo" / "curves.html").exists()
