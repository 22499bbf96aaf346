"""The heap that processes which train on CPU begin with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from plimsoll.machine import heap as allocator
from plimsoll.machine.heap import SETTINGS, library, preload_settings

pytestmark = pytest.mark.skipif(library() is None, reason="Ray came without jemalloc here")
no_cards = pytest.mark.skipif(allocator._NVIDIA.exists(), reason="this machine has NVIDIA's driver")

_BEGIN = """
import os, sys
from pathlib import Path
from plimsoll.machine.heap import restart_with_jemalloc
restart_with_jemalloc()
maps = Path("/proc/self/maps").read_text()
print(sys.argv[1:], "libjemalloc" in maps, repr(os.environ.get("LD_PRELOAD")))
"""


def begun(*words: str, **environment: str) -> str:
    command = [sys.executable, "-c", _BEGIN, *words]
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip()


@no_cards
def test_a_process_begins_anew_once_and_its_children_do_not() -> None:
    assert begun("a b", "--key") == "['a b', '--key'] True None"


@no_cards
def test_what_else_was_preloaded_still_is() -> None:
    other = "/lib/x86_64-linux-gnu/libm.so.6"
    if not os.path.exists(other):
        pytest.skip("no libm where Debian has it")
    assert begun(LD_PRELOAD=other) == f"[] True {other!r}"
    assert preload_settings({"LD_PRELOAD": other})["LD_PRELOAD"] == f"{library()}:{other}"


def test_a_heap_that_somebody_chose_stays() -> None:
    assert preload_settings({"LD_PRELOAD": "/usr/lib/libtcmalloc_minimal.so.4"}) == {}
    assert preload_settings({}) == {"LD_PRELOAD": str(library()), "MALLOC_CONF": SETTINGS}
    assert preload_settings({"MALLOC_CONF": "narenas:1"})["MALLOC_CONF"] == "narenas:1"


@pytest.mark.parametrize("why", ["no library", "NVIDIA's driver", "a debugger"])
def test_nothing_begins_anew_without_need(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("began anew"))
    if why == "no library":
        monkeypatch.setattr(allocator, "library", lambda: None)
        assert preload_settings({}) == {}
    elif why == "a debugger":
        monkeypatch.setattr(sys, "gettrace", lambda: print)
    else:
        monkeypatch.setattr(allocator, "_NVIDIA", tmp_path)
    allocator.restart_with_jemalloc()


def test_a_path_that_ld_preload_would_divide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, found in (("mine", True), ("my own", False), ("my:own", False)):
        file = tmp_path / name / "ray" / "core" / "libjemalloc.so"
        file.parent.mkdir(parents=True)
        file.touch()
        spec = SimpleNamespace(origin=str(file.parents[1] / "__init__.py"))
        monkeypatch.setattr("importlib.util.find_spec", lambda _, spec=spec: spec)
        assert (library() == file) is found
        assert ("LD_PRELOAD" in preload_settings({})) is found


def decaying_in(milliseconds: int) -> str:
    """The settings, but for how soon what is free is given back."""
    return re.sub(r"dirty_decay_ms:\d+", f"dirty_decay_ms:{milliseconds}", SETTINGS)


_FREED = """
import time, torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
tensors = [torch.ones(2**20) for _ in range(64)]
kept = [tensor[:16].clone() for tensor in tensors]  # small ones between them, which last
full = resident()
del tensors
until = time.monotonic() + 30
while resident() > full - 240 * 2**20 and time.monotonic() < until:
    time.sleep(0.1)
print(full - resident() > 240 * 2**20, len(kept))
"""


def test_the_system_soon_gets_back_what_tensors_free() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREED],
        # ten times as soon
        env=os.environ | preload_settings({}) | {"MALLOC_CONF": decaying_in(100)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "64"], done.stderr


_RELEASED = """
import psutil, torch
from plimsoll.machine.heap import keep_large_blocks, release_free_blocks
keep_large_blocks()
def resident():
    return psutil.Process().memory_info().rss
tensors = [torch.ones(2**20) for _ in range(64)]
full = resident()
del tensors
kept = resident()
release_free_blocks()
print(full - kept < 2**26, full - resident() > 240 * 2**20)
"""


def test_free_blocks_are_given_back_at_once_where_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RELEASED],
        env=os.environ | preload_settings({}) | {"MALLOC_CONF": decaying_in(600_000)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


_AGAIN = """
import resource, torch
from plimsoll.machine.heap import keep_large_blocks
keep_large_blocks()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():  # of neighbours, which are joined to a large block as they are freed
    del [torch.ones(2**20) for _ in range(16)][:]
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) * 4096 < 2**24)
"""


def test_blocks_that_are_soon_used_again_are_not_given_back() -> None:
    """jemalloc 5.3 would give all 640 MiB back and ask for them anew."""
    done = subprocess.run(
        [sys.executable, "-c", _AGAIN],
        # years: each two-hundredth of that time one block at least is given back, however large
        env=os.environ | preload_settings({}) | {"MALLOC_CONF": decaying_in(10**12)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True"], done.stderr
