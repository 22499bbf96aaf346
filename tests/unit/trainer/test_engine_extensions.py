"""A lock that a killed process left does not make later ones wait for ever; ninja is found."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plimsoll.errors import PlimsollError
from plimsoll.machine.versions import own_scripts
from plimsoll.trainer.zero.optimizer import MOST_SECONDS, building, offer_ninja


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
from plimsoll.trainer.zero.optimizer import building
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
