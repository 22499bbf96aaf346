"""The process in the sandbox that runs one program on its cases; programs.py sends the cases.

Each case runs in a fork of this process. The fork limits its resources, runs the program and the
case, and writes the result to a file in memory. A fork may damage this process, but that harms only
this program: programs.py takes an answer as the result of the present case and as nothing else.
This module imports only the standard library.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import site
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_OUTPUT_BYTES = 4 * 1024**2
_RESULT = 3  # where a fork writes what a call gave


def open_program(setup: dict[str, Any]) -> Callable[[dict[str, Any]], list[str]]:
    """Return the function that runs a case and returns [how it ended, its output]."""
    site.setquit()  # programs call exit()
    return partial(_run, setup)


def _run(setup: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """Run a case in a fork; return [how it ended, its output].

    How is "done", "error" or "time". A check counts as done only if it wrote a random word at its
    end.
    """
    result, word = os.memfd_create("result"), os.urandom(16).hex()
    child = os.fork()
    if child == 0:
        try:
            _run_case(setup, case, result, word)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = os.pread(result, _OUTPUT_BYTES, 0).decode("utf-8", "replace")
    os.close(result)
    if code == -signal.SIGXCPU:
        return ["time", output]
    unfinished = "check" in case and output != word
    return ["error" if code or unfinished else "done", output]


def _run_case(setup: dict[str, Any], case: dict[str, Any], result: int, word: str) -> None:
    """Run a case in the fork and exit the fork with code 0 if the case succeeds."""
    _open_streams(str(case.get("input", "")), result, to_output="input" in case)
    _limit(math.ceil(setup["seconds"]), setup["memory_bytes"])
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(setup["program"], "response", "exec"), space)
        if "call" in case:
            _write(_call(space, case["call"], case["arguments"]))
        elif "check" in case:
            exec(compile(case["check"], "tests", "exec"), space)
            _write(word)
    except SystemExit as leaving:  # as many programs end
        code = leaving.code
        if "input" not in case or not (code is None or code == 0):
            raise
    sys.stdout.flush()
    os._exit(0)


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process's CPU time, memory, files and processes."""
    bounds = {
        resource.RLIMIT_CPU: cpu_seconds + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _OUTPUT_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 64,
    }
    for kind, value in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard < 0 else min(value, hard)  # below zero: there is no limit
        # SIGXCPU comes at the first bound; without a second one after it, SIGKILL instead.
        soft = min(cpu_seconds, value) if kind == resource.RLIMIT_CPU else value
        resource.setrlimit(kind, (soft, value))


def _open_streams(text: str, result: int, to_output: bool) -> None:
    """Set standard input to the text and output to the result or /dev/null; close other files."""
    given, nowhere = os.memfd_create("input"), os.open(os.devnull, os.O_WRONLY)
    with open(os.dup(given), "wb") as file:
        file.write(text.encode())
    os.lseek(given, 0, os.SEEK_SET)
    kept = os.dup(result)
    for source, place in ((given, 0), (kept if to_output else nowhere, 1), (nowhere, 2)):
        os.dup2(source, place)
    os.dup2(kept, _RESULT)
    os.closerange(_RESULT if to_output else _RESULT + 1, 256)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _call(space: dict[str, Any], name: str, arguments: list[Any]) -> str:
    """Call the function, or the method of a class Solution; return the result as JSON."""
    function = space[name] if name in space else getattr(space["Solution"](), name)
    value = function(*arguments)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return json.dumps(repr(value))


def _write(text: str) -> None:
    os.write(_RESULT, text.encode())
