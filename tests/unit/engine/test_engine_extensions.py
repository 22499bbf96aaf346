"""A lock that a killed process left does not make later ones wait for ever; ninja is found, and a
compiler that is not there is named."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plimsoll.engine.zero.extensions import MOST_SECONDS, building, offer_ninja
from plimsoll.errors import PlimsollError
from plimsoll.machine.tools import own_scripts


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def test_nothing_is_waited_for_without_a_lock(lock: Path) -> None:
    with building("cpu_adam"):
        assert not lock.exists()


def test_a_build_that_goes_on_is_waited_for(lock: Path) -> None:
    lock.touch()
    ends = threading.Timer(0.2, lock.unlink)
    ends.start()
    with building("cpu_adam"):
        assert not lock.exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
from plimsoll.engine.zero.extensions import building
with building("cpu_adam"):
    Path(sys.argv[1]).touch()  # as torch does while it compiles
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed(lock: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(lock)])
    assert done.returncode == -signal.SIGKILL and lock.exists()
    with building("cpu_adam"):
        assert not lock.exists()
    assert not (lock.parent / "plimsoll.building").exists()


def test_runs_compile_one_after_another(lock: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with building("cpu_adam"):
            order.append("second")

    with building("cpu_adam"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_without_locks_of_the_file_system_torchs_is_waited_for(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    lock.touch()
    (lock.parent / "plimsoll.building").touch()  # of a run that may go on
    ends = threading.Timer(0.2, lock.unlink)
    ends.start()
    with building("cpu_adam"):
        assert not ends.is_alive()


def test_an_old_lock_is_named(lock: Path) -> None:
    lock.touch()
    old = time.time() - MOST_SECONDS - 5 * 60
    os.utime(lock, (old, old))
    told = r"cpu_adam/lock has been there for 15 minutes"
    with pytest.raises(PlimsollError, match=told), building("cpu_adam"):
        pass
    assert lock.exists()
    with pytest.raises(PlimsollError, match=told), building("cpu_adam"):  # another program's still
        pass


def test_the_ninja_of_this_python_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if shutil.which("ninja", path=own_scripts()) is None:
        pytest.skip("Python has no ninja of its own here")
    offer_ninja()
    assert shutil.which("ninja") == f"{own_scripts()}/ninja"
    assert os.environ["PATH"].startswith(f"{tmp_path}:")


_OFFLOADED = """
import torch
from plimsoll.config.engine import TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.engine.zero.optimizer import make_optimizer
from plimsoll.errors import PlimsollError

zero = ZeroConfig(stage=2, optimizer_offload="cpu")
try:
    model = ModelConfig(path="any", dtype="bfloat16")
    make_optimizer(torch.nn.Linear(2, 2), TrainedRole(model=model).with_engine(zero))
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
