"""A lock that a killed process left does not make later ones wait for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from plimsoll.engine.extensions import MOST_SECONDS, await_build
from plimsoll.errors import PlimsollError


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
