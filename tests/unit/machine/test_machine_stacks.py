"""Processes that are asked for their threads' stacks, and processes that are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from plimsoll.machine.processes import ask_for_stacks, end_processes

WAITING = """
import threading
{}
def waits_here():
    print("ready", flush=True)
    threading.Event().wait()
waits_here()
"""
ANSWERING = WAITING.format(
    "from plimsoll.machine.processes import write_stacks_when_asked; write_stacks_when_asked()"
)
WITH_A_CHILD = WAITING.format(
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)"
)


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_who_can_writes_its_stacks_and_who_is_stopped_is_named() -> None:
    with (
        running(ANSWERING) as answering,
        running(WAITING.format("")) as deaf,
        running(ANSWERING) as stopped,
    ):
        psutil.Process(stopped.pid).suspend()
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
            pass  # the signal takes a moment
        [named] = ask_for_stacks([answering.pid, deaf.pid, stopped.pid])
        assert named.startswith(f"{stopped.pid} ({sys.executable}"[:40])
        assert answering.stderr is not None and stopped.stderr is not None
        while "in waits_here" not in answering.stderr.readline():
            assert answering.poll() is None
        assert deaf.poll() is None, "the signal ended what does not know it"


def test_a_stopped_process_is_ended_with_those_below_it() -> None:
    with running(WITH_A_CHILD) as parent:
        family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
        assert len(family) == 2
        for process in family:
            process.suspend()
        end_processes([parent.pid])
        gone, alive = psutil.wait_procs(family, timeout=60)
        assert len(gone) == 2 and not alive


def test_processes_that_are_gone_are_left_out() -> None:
    with running(WAITING.format("")) as process:
        pass
    assert ask_for_stacks([process.pid]) == []
    end_processes([process.pid])
