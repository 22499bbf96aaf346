"""What a process reads of itself, of its children, and of its card."""

from __future__ import annotations

import mmap
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from plimsoll.machine.processes import child_processes, read_host, reset_process_peak
from plimsoll.run.readings import CardReading
from plimsoll.trainer.memory import read_card, read_memory

MIB = 2**20
needs_reset = pytest.mark.skipif(not reset_process_peak(), reason="peaks cannot be reset here")


@needs_reset
def test_a_reading_sees_what_came_and_went_since_the_one_before() -> None:
    read_memory(torch.device("cpu"))
    with mmap.mmap(-1, 200 * MIB) as block:  # not of malloc, which may hold as much of old blocks
        np.frombuffer(block, np.uint8).fill(1)
    first, second = (read_memory(torch.device("cpu")) for _ in range(2))
    assert first.card is None and first.host.node == second.host.node
    assert first.peak.host >= first.held.host + 190 * MIB
    assert second.peak.host < first.peak.host - 150 * MIB
    assert 0 < first.host.held < first.host.used < first.host.capacity
    assert first.host.capacity <= psutil.virtual_memory().total


CHILD = """
block = bytearray(b"x") * (100 * 2**20)
print("ready", flush=True)
input()
del block
print("gone", flush=True)
input()
"""


@needs_reset
def test_children_count_until_they_are_gone() -> None:
    alone = read_host().held
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert child.pid in child_processes()
    children = (child.pid,)  # other tests may have left some
    assert read_host(children).held > alone + 90 * MIB
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "gone\n"
    after = read_host(children)
    assert after.peak > after.held + 90 * MIB
    child.communicate("\n")
    assert read_host(children).held < alone + 50 * MIB


def test_a_card_is_read_before_its_peaks_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no card here: these are its numbers."""
    peaks = {"max_memory_allocated": 50, "max_memory_reserved": 70}
    numbers = {**peaks, "memory_allocated": 30, "memory_reserved": 60, "mem_get_info": (110, 200)}
    numbers |= {"get_device_properties": SimpleNamespace(uuid="of-no-card")}
    for name in numbers:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: numbers[name])

    def reset(device: torch.device) -> None:
        numbers.update(max_memory_allocated=30, max_memory_reserved=60)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    first, second = (read_card(torch.device("cuda", 0)) for _ in range(2))
    assert first == CardReading(50, 70, 30, 60, used=90, capacity=200)
    assert (first.peak_used, second.peak_used) == (100, 90)
