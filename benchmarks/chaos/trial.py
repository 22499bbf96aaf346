"""Run a job as a child process with faults in it, and watch it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fault_injection
import psutil
from fault_injection import FIRED

from plimsoll.errors import PlimsollError
from plimsoll.machine.faults import DIRECTORY, FAULTS
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import read_rows

OUTPUT = "output.txt"
"""The file in a trial's directory with what its runs printed."""
_EVERY = 0.1
"""Seconds between two looks at the run."""
_END_SECONDS = 30.0
"""How long the processes of a run may go on after its command has ended."""


_FINAL = (0, 2, 3, 4)
"""Exit codes of a run that is done, or refused: another start would do the same."""


@dataclass(frozen=True)
class DisturbedJob:
    """A run to disturb.

    Attributes:
        words: The job's command, such as `["grpo", "config.yaml"]`, with its flags.
        patience: Seconds without a new step after which the run is ended.
        starts: How often the command is started at most.
    """

    words: Sequence[str]
    patience: float
    starts: int


@dataclass(frozen=True)
class FiredFault:
    """A fault that has happened."""

    fault: str
    process: str
    time: float
    """Seconds since 1970."""
    seconds: float | None
    """From the fault until a step that was not done before, or the run's end; None: never."""


@dataclass(frozen=True)
class FaultTrial:
    """A run with its faults."""

    fired: tuple[FiredFault, ...]
    starts: int
    """How often the command was started."""
    code: int | None
    """The exit code of the last start; None if it was ended for want of progress."""
    left: tuple[str, ...]
    """Processes that went on after their command had ended."""
    seconds: float


def run_trial(job: DisturbedJob, directory: Path, faults: str, record: Path) -> FaultTrial:
    """Run a job with faults until it is done, starting its command again after each failure.

    Args:
        job: The job.
        directory: The run directory.
        faults: The text of `PLIMSOLL_FAULTS`.
        record: The directory for the faults' marks and record.
    """
    record.mkdir(parents=True, exist_ok=True)
    steps, begin, left = StepWatch(RunDirectory(directory)), time.time(), list[str]()
    code: int | None = None
    starts = 0
    while starts < job.starts and code not in _FINAL:
        code, after = _start(job, directory, faults, record, steps)
        left, starts = left + after, starts + 1
    end = time.time()
    fired = [
        FiredFault(
            row["fault"],
            row["process"],
            row["time"],
            steps.seconds_to_recover(row["time"], end if code == 0 else None),
        )
        for row in read_fired(record)
    ]
    return FaultTrial(tuple(fired), starts, code, tuple(left), end - begin)


def read_fired(record: Path) -> list[dict[str, Any]]:
    """Return the rows of the faults that have happened, in the order of time."""
    path = record / FIRED
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


@dataclass
class StepWatch:
    """The times at which new steps of a run were seen."""

    run: RunDirectory
    seen: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since 1970, last step), for each step that was new."""
    _size: int = -1

    def look(self) -> None:
        """Note the last step if it is new, with the time at which its row was written."""
        path = self.run.metrics_path
        state = path.stat() if path.is_file() else None
        if state is None or state.st_size == self._size:
            return
        self._size = state.st_size
        step = _last_step(path)
        if step > max((last for _, last in self.seen), default=-1):
            self.seen.append((state.st_mtime, step))

    @property
    def latest(self) -> float:
        """The time of the last new step; 0 before the first."""
        return self.seen[-1][0] if self.seen else 0.0

    def seconds_to_recover(self, fault: float, end: float | None) -> float | None:
        """Return the seconds from a fault to the next new step, or else to the run's end."""
        later = [at for at, _ in self.seen if at > fault]
        after = later[0] if later else end
        return None if after is None else max(0.0, after - fault)


def _last_step(path: Path) -> int:
    """Return the last step with a whole row."""
    with suppress(PlimsollError, OSError):
        return max((int(row["step"]) for row in read_rows(path)), default=-1)
    return -1  # a row is being written


def _start(
    job: DisturbedJob, directory: Path, faults: str, record: Path, steps: StepWatch
) -> tuple[int | None, list[str]]:
    """Start the command once; return its exit code, and the processes that it left behind."""
    given = ("--run.directory", str(directory), "--run.resume=auto")
    with (record / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "plimsoll", *job.words, *given],
            env=_environment(faults, record),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    begin, code = time.time(), None
    try:
        while (code := process.poll()) is None:
            steps.look()
            if time.time() - max(begin, steps.latest) > job.patience:
                break
            time.sleep(_EVERY)
        steps.look()
    finally:
        left = _end_rest(process.pid, record, at_once=code is None)
        process.wait()
    return code, [] if code is None else left


def _environment(faults: str, record: Path) -> Mapping[str, str]:
    # Ray's processes write their titles over their environment, which `rest_of_run` reads.
    directory = {DIRECTORY: str(record.absolute()), "SPT_NOENV": "1"}
    paths = [str(Path(fault_injection.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    paths = [path for path in paths if path]
    return {**os.environ, FAULTS: faults, **directory, "PYTHONPATH": os.pathsep.join(paths)}


def _end_rest(session: int, record: Path, *, at_once: bool) -> list[str]:
    """Wait for the processes of a run to end; kill those that do not, and return their names."""
    deadline = time.monotonic() + (0.0 if at_once else _END_SECONDS)
    while (rest := rest_of_run(session, record)) and time.monotonic() < deadline:
        time.sleep(_EVERY)
    names = []
    for process in rest:
        with suppress(psutil.Error):
            names.append(f"{process.name()} ({process.pid})")
            process.kill()
    return names


def rest_of_run(session: int, record: Path) -> list[psutil.Process]:
    """Return the processes that a command of this session has started and that still go on."""
    rest, mark = [], str(record.absolute())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) == session or process.environ().get(DIRECTORY) == mark:
                rest.append(process)
    return rest
