"""The clock, the memory of the process, and signals."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from plimsoll.machine.processes import process_bytes, process_peak_bytes, reset_process_peak
from plimsoll.run.ending import StopRequest
from plimsoll.run.phases import PhaseClock


def test_the_clock_adds_up_by_phase() -> None:
    clock = PhaseClock()
    start = time.perf_counter()
    for _ in range(2):
        with clock.phase("rollout"):
            time.sleep(0.02)
        with clock.phase("score"):
            time.sleep(0.005)
    whole = time.perf_counter() - start
    seconds = clock.seconds()
    assert list(seconds) == ["rollout", "score"]
    assert seconds["rollout"] >= 0.04 and seconds["score"] >= 0.01
    assert sum(seconds.values()) <= whole
    clock.reset()
    assert clock.seconds() == {}


def test_a_phase_that_fails_is_counted_and_ends() -> None:
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.phase("sync"):
        raise KeyError
    with clock.phase("save"):
        pass
    assert list(clock.seconds()) == ["sync", "save"]


def test_phases_do_not_nest() -> None:
    clock = PhaseClock()
    with (
        pytest.raises(AssertionError, match="phase sync inside of rollout"),
        clock.phase("rollout"),
        clock.phase("sync"),
    ):
        pass


def test_the_peak_sees_memory_that_is_gone_again() -> None:
    size = 200 * 1024**2
    reset = reset_process_peak()
    before = process_bytes()
    # Pages of its own: a heap keeps what was freed, or serves it from what is there already.
    with mmap.mmap(-1, size) as block:
        block.write(b"1" * size)
    assert process_peak_bytes() >= before + 0.9 * size
    assert process_bytes() < before + 0.5 * size
    if reset:
        assert reset_process_peak()
        assert process_peak_bytes() < before + 0.5 * size


def test_the_first_signal_asks_and_the_second_stops(capfd: pytest.CaptureFixture[str]) -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    with StopRequest() as stop:
        seen = [stop.requested]
        signal.raise_signal(signal.SIGTERM)
        seen.append(stop.requested)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert seen == [False, True]
    assert {s: signal.getsignal(s) for s in before} == before
    assert re.search("after this step.*Ctrl-C again", capfd.readouterr().err)


def test_the_first_signal_stops_what_only_loads(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        stop.at_once = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested
    assert capfd.readouterr().err == "\nstopping\n"


def test_a_real_ctrl_c_ends_a_loop_at_its_safe_point() -> None:
    program = """
import time
from plimsoll.run.ending import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
print("saved")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "saved\n")
    assert "stopping after this step" in errors


def test_a_run_without_a_reader_goes_on_and_says_so_once() -> None:
    script = (
        "from pathlib import Path\n"
        "from plimsoll.run.ending import StopRequest\n"
        "from plimsoll.run.progress import Progress\n"
        "import os, signal\n"
        "with StopRequest() as stop, Progress('sft', 3, Path('out')) as progress:\n"
        "    for _ in range(3): progress.note('x' * 100_000)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop.requested"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script]
    seen = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    assert seen.returncode == 0, seen.stderr
    assert seen.stderr.count("goes on unseen") == 1 and "stopping after this step" in seen.stderr
    assert subprocess.run(command, stdout=writer, stderr=writer).returncode == 0
    os.close(writer)
    with open("/dev/full", "w") as full:
        seen = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert seen.returncode == 0 and seen.stderr.count("No space left on device") == 1
