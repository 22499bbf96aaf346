"""Each job of the demo has a process of its own, and the demo ends as its job does."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest
from commands import Command, run, title, wait_for

from plimsoll.run.directory import RunDirectory
from plimsoll.run.phases import VARIABLE

STOPPED = "The demo is stopped. The same command goes on from there."


def saved_step(home: Path) -> int:
    """Return the step of SFT's last checkpoint."""
    saved = RunDirectory(home / "runs" / "demo" / "sft").latest_checkpoint()
    assert saved is not None
    return saved[0]


@pytest.mark.slow
def test_a_stopped_demo_saves_its_job_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    """`kill -INT` and `kill` reach the demo's process alone, which passes them on to its job."""
    command = Command(tmp_path, "demo")
    command.read_until("sft step")
    (job,) = psutil.Process(command.process.pid).children()
    assert "sft.yaml" in title(job)
    command.process.send_signal(signal.SIGINT)
    outcome = command.finish()
    assert outcome.code == 130, outcome.err
    stopped, last = outcome.err.strip().splitlines()[-2:]
    assert stopped.startswith("stopped after step") and "everything is saved" in stopped
    assert last == STOPPED
    wait_for(lambda: not command.processes(), "the end of all processes of the demo")

    again = Command(tmp_path, "demo")
    again.read_until(f"sft step {saved_step(tmp_path) + 1:>3}/300")
    again.process.terminate()
    outcome = again.finish()
    assert outcome.code == 130 and outcome.err.strip().splitlines()[-1] == STOPPED


def test_ctrl_c_in_a_terminal_saves_the_job(tmp_path: Path) -> None:
    """The terminal interrupts the demo's process and the job's, each once."""
    ours, theirs = os.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "plimsoll", "demo"],
        cwd=tmp_path,
        env={name: os.environ[name] for name in os.environ if name != VARIABLE} | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    read_until(ours, "tokens/s")
    os.write(ours, b"\x03")
    said = read_until(ours, STOPPED)
    assert "stopped after step" in said and "everything is saved" in said
    assert command.wait() == 130
    os.close(ours)
    assert saved_step(tmp_path) > 0


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal shows, up to this text."""
    shown = ""
    while text not in shown:
        shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.slow
def test_a_job_that_fails_ends_the_demo_with_its_message_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "sft").write_text("a file in the place of the run's directory")
    outcome = run(tmp_path, "demo")
    assert outcome.code == 2
    *why, last = outcome.err.strip().splitlines()
    assert why[0].startswith("error: ") and "runs/demo/sft" in "".join(why)
    assert "stage sft, with exit code 2." in last


@pytest.mark.slow
def test_a_demo_that_this_machine_cannot_run_ends_before_its_first_job(tmp_path: Path) -> None:
    """Its preparation says why: vLLM's build for CPUs needs g++."""
    outcome = run(tmp_path, "demo", environment={"PATH": "/nowhere"})
    assert outcome.code == 2 and "needs g++" in outcome.err
    last = outcome.err.strip().splitlines()[-1]
    assert "stage preparation, with exit code" in last
    assert not (tmp_path / "runs" / "demo" / "sft").exists()
