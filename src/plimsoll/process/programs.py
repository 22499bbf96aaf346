"""Run programs that a policy wrote on their cases, in a sandbox (program_runner.py).

The sandbox is that of bubblewrap, https://github.com/containers/bubblewrap. A program in it sees
`/usr`, the system's libraries and this interpreter with its packages, all of them read-only. It has
an empty folder `/tmp` in memory. It sees no other file, process, network or environment variable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.process.child import Child, ChildEnded, Program
from plimsoll.process.program_runner import open_program

Sandbox = Literal["bwrap", "none"]
"""The sandbox of a program: bubblewrap, or none."""

_FOLDER = "/tmp"
_FOLDER_BYTES = 64 * 2**20
_HOUSE = Path(__file__).parents[1]
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def _sandboxed_python(sandbox: Sandbox) -> tuple[str, ...]:
    """Return the command that starts this Python in the sandbox.

    Raises FileNotFoundError if bubblewrap is not installed.
    """
    # Without -S what *.pth files do would take its time at each start.
    python = (os.path.realpath(sys.executable), "-S", "-B", "-P")
    if sandbox == "none":
        return python
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap")
    read_only = dict.fromkeys((sys.base_prefix, *_packages(), str(_HOUSE)))
    return (
        *(bwrap, "--unshare-all", "--die-with-parent", "--new-session"),
        *_folder_words(bwrap),  # first: packages may lie within
        *(word for path in _SYSTEM for word in ("--ro-bind-try", path, path)),
        *(word for path in read_only for word in ("--ro-bind", path, path)),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        *("--remount-ro", "/", "--chdir", _FOLDER, "--", *python),
    )


@cache
def _folder_words(bwrap: str) -> Sequence[str]:
    """Return bubblewrap's options for `/tmp`: in memory and limited; not writable before 0.7."""
    help_ = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    sized = ("--size", str(_FOLDER_BYTES), "--tmpfs", _FOLDER)
    return sized if "--size" in help_ else ("--dir", _FOLDER)


def _sandbox_environment() -> Mapping[str, str]:
    """Return the environment variables of a program; none is inherited from this process."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": _FOLDER,
        "PYTHONPATH": os.pathsep.join((str(_HOUSE.parent), *_packages())),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _packages() -> Sequence[str]:
    """Return the folders that installed packages are in."""
    return [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]


REMEDY = (
    "`apt install bubblewrap`, and allow user namespaces (docs/rewards.md, Code); or write "
    "`sandbox: none`, with which the programs of a policy may do all that you may"
)
"""The remedy if the sandbox does not work."""
_TRIAL = "import threading\nthreading.Thread(target=print, args=(input(),)).start()"


@dataclass(frozen=True)
class ProgramBounds:
    """The limits of a program.

    Attributes:
        seconds: CPU time for one case, rounded up. Its wall-clock time may be twice as long.
        total_seconds: Wall-clock time for all cases together.
        memory_bytes: Memory of one process.
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
    if sandbox == "bwrap" and (why := sandbox_trouble()):
        raise ConfigError(f"sandbox is bwrap. {why} Do: {REMEDY}.")
    return _run(program, cases, bounds, sandbox)


@cache
def sandbox_trouble() -> str:
    """Return why the sandbox does not work on this machine, in sentences; "" if it does.

    A small program is run in the sandbox, once in each process.
    """
    purpose = "Programs of a policy run in a sandbox by bubblewrap."
    try:
        (result,) = _run(_TRIAL, [{"input": "1"}], ProgramBounds(5.0, 20.0, 2**30), "bwrap")
    except FileNotFoundError:
        return f"{purpose} There is no `bwrap` on the PATH."
    except (OSError, PlimsollError) as error:
        return f"{purpose} It does not work here: {str(error).rstrip('.')}."
    good = result == CaseResult("done", "1\n")
    return "" if good else f"{purpose} A program in it that prints 1 in a thread gave {result}."


def _run(
    program: str, cases: Sequence[Mapping[str, object]], bounds: ProgramBounds, sandbox: Sandbox
) -> list[CaseResult]:
    """Run the cases in one runner and return their results.

    After a case that ends the runner, or whose time is over, the next case gets a new runner.
    """
    runner, results = _start(program, bounds, sandbox), list[CaseResult]()
    until = time.monotonic() + bounds.total_seconds
    try:
        for case in cases:
            seconds = min(2 * bounds.seconds, until - time.monotonic())
            if seconds > 0 and not runner.is_idle:
                runner = _start(program, bounds, sandbox)
            results.append(_ask(runner, case, seconds) if seconds > 0 else CaseResult("time"))
    finally:
        runner.end()
    return results


def _start(program: str, bounds: ProgramBounds, sandbox: Sandbox) -> Child:
    runner = Child(
        Program(
            open_program,
            what="The process that runs programs",
            setup={"program": program, **vars(bounds)},
            python=_sandboxed_python(sandbox),
            environment=_sandbox_environment(),
            forwards=False,
        )
    )
    runner.open()
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
