"""A lock that a killed process left does not make later ones wait for ever; ninja is found, and a
compiler that is not there is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plimsoll.engine.extensions import MOST_SECONDS, await_build, offer_ninja
from plimsoll.errors import PlimsollError
from plimsoll.memory.machine.tools import own_scripts


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def test_nothing_is_waited_for_without_a_lock(lock: Path) -> None:
    await_build("cpu_adam")
    assert not lock.exists()


def test_a_build_that_goes_on_is_waited_for(lock: Path) -> None:
    lock.touch()
    ends = threading.Timer(0.2, lock.unlink)
    ends.start()
    await_build("cpu_adam")
    assert not lock.exists()


def test_an_old_lock_is_named(lock: Path) -> None:
    lock.touch()
    old = time.time() - MOST_SECONDS - 5 * 60
    os.utime(lock, (old, old))
    with pytest.raises(PlimsollError, match=r"cpu_adam/lock has been there for 15 minutes"):
        await_build("cpu_adam")
    assert lock.exists()


def test_the_ninja_of_this_python_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if shutil.which("ninja", path=own_scripts()) is None:
        pytest.skip("Python has no ninja of its own here")
    offer_ninja()
    assert shutil.which("ninja") == f"{own_scripts()}/ninja"
    assert os.environ["PATH"].startswith(f"{tmp_path}:")


_OFFLOADED = """
import torch
from plimsoll.config.engine import TrainedRole, ZeroConfig
from plimsoll.config.model import ModelConfig
from plimsoll.engine.optimizer import make_optimizer
from plimsoll.errors import PlimsollError

zero = ZeroConfig(stage=2, optimizer_offload="cpu")
try:
    make_optimizer(torch.nn.Linear(2, 2), TrainedRole(model=ModelConfig(path="any"), zero=zero))
except PlimsollError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("CXX", "/no-compiler", r"cannot be compiled or loaded: \S+ 1: /no-compiler: not found\n"),
        ("CXX", "{folder}/empty", r"/cpu_adam.so: file too short\n"),  # or of another machine
        ("TORCH_EXTENSIONS_DIR", "/proc/nobody", r"No such file or directory: '/proc/nobody"),
    ],
    ids=["compiler", "library", "directory"],
)
def test_an_adam_that_cannot_be_compiled_is_explained(
    variable: str, value: str, told: str, tmp_path: Path
) -> None:
    """In a process of its own: one that has loaded it once compiles nothing."""
    settings = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    compiler = tmp_path / "empty"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 1 ]; do case $1 in -o|-MF) : > "$2";; esac; shift; done\n'
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", _OFFLOADED],
        env=settings | {variable: value.format(folder=tmp_path)},
        capture_output=True,
        text=True,
    )
    assert re.search(rf"Adam for the CPU .*{told}", done.stdout, re.DOTALL), done.stderr
