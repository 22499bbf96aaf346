"""The process in the sandbox that runs one program on its cases; programs.py sends the cases.

Each case runs in a fork of this process. The fork limits its resources, runs the program and the
case, and writes the result to a file in memory. Assertions run in a fork that calls the program's
functions in another process, and alone says whether they hold (assertions.py). The program's
process is a fork of one that has never read assertions, whose memory would tell what they expect.

A fork may kill or stop this process, but that harms only this program: programs.py takes an answer
as the result of the present case and as nothing else. This process cannot be traced or robbed of
its files, as it is not dumpable. This module imports only the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import site
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from plimsoll.process.system_calls import make_filter

_OUTPUT_BYTES = 4 * 1024**2
_ANSWER_BYTES = 7 * 1024**2
"""The most bytes that an output may take as JSON, as an answer must fit one line."""
_RESULT = 3  # where a fork writes what a call gave
_FIRST_UNUSED = 16  # above all files that a fork keeps
_PR_SET_DUMPABLE = 4  # linux/prctl.h


def open_program(setup: dict[str, Any]) -> Callable[[dict[str, Any]], list[str]]:
    """Return the function that runs a case and returns [how it ended, its output].

    How is "done", "error" or "time".
    """
    site.setquit()  # programs call exit()
    _set_dumpable(False)
    setup["filter"] = make_filter() if setup["is_filtered"] else lambda: None
    programs = _start_programs(setup) if setup["has_checks"] else None

    def answer(case: dict[str, Any]) -> list[str]:
        if programs and "check" in case:
            return _check(setup, programs, case["check"])
        return _run(setup, case)

    return answer


def _set_dumpable(is_dumpable: bool) -> None:
    """Set whether other processes of the user may trace this one and take its files."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0)


def _run(setup: dict[str, Any], case: dict[str, Any]) -> list[str]:
    given, result = os.memfd_create("input"), os.memfd_create("result")
    os.pwrite(given, str(case.get("input", "")).encode(), 0)
    files = (given, result) if "input" in case else (given, None, None, result)
    how = _wait(_fork(setup, files, partial(_run_case, setup["program"], case)))
    output = os.pread(result, _OUTPUT_BYTES, 0).decode("utf-8", "replace")
    os.close(given)
    os.close(result)
    is_long = len(output) > _ANSWER_BYTES // 12 and len(json.dumps(output)) > _ANSWER_BYTES
    return ["error", ""] if is_long else [how, output]


def _start_programs(setup: dict[str, Any]) -> socket.socket:
    """Start the process that forks programs, and return the socket to it.

    It takes a message with the two files of a program. After a second message it ends the program,
    and answers with how it had ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() > 0:
        theirs.close()
        return ours
    try:
        _keep_files((None, None, None, theirs.fileno()))
        asked = socket.socket(fileno=3)
        while files := socket.recv_fds(asked, 1, 2)[1]:
            program = _fork(setup, (None, None, None, *files), partial(_serve, setup["program"]))
            for file in files:
                os.close(file)
            asked.recv(1)
            os.kill(program, signal.SIGKILL)
            asked.send(_wait(program).encode())
    finally:
        os._exit(1)


def _check(setup: dict[str, Any], programs: socket.socket, assertions: str) -> list[str]:
    """Run assertions about the program; only if they run to their end are they "done"."""
    from plimsoll.process.assertions import judge

    def run_judge() -> None:
        judge(assertions, os.fdopen(3, "rb"), os.fdopen(4, "wb"))
        os._exit(0)

    questions, answers = os.pipe(), os.pipe()
    judging = _fork(setup, (None, None, None, answers[0], questions[1]), run_judge)
    socket.send_fds(programs, [b"1"], [questions[0], answers[1]])
    for file in (*questions, *answers):
        os.close(file)
    how = _wait(judging)
    programs.send(b"0")
    return ["time" if programs.recv(16) == b"time" else how, ""]


def _fork(
    setup: dict[str, Any], files: Sequence[int | None], function: Callable[[], object]
) -> int:
    """Run a function in a fork that has limits, and return the fork's process id.

    The function ends the fork with code 0 if it succeeds.

    Args:
        setup: The limits, as programs.py sends them, and the filter of system calls.
        files: The fork's files 0, 1, ...; None is /dev/null.
        function: What the fork does.
    """
    child = os.fork()
    if child == 0:
        try:
            _keep_files(files)
            _limit(math.ceil(setup["seconds"]), setup["memory_bytes"])
            setup["filter"]()
            function()
        finally:
            os._exit(1)
    return child


def _wait(child: int) -> str:
    """Wait for a fork and return how it ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "time" if code == -signal.SIGXCPU else "error" if code else "done"


def _run_case(program: str, case: dict[str, Any]) -> None:
    """Run the program, and the call of the case if there is one."""
    try:
        space = _run_program(program)
        if "call" in case:
            text = _call(space, case["call"], case["arguments"])
            os.write(_RESULT, text.encode())
    except SystemExit as leaving:  # as many programs end
        code = leaving.code
        if "input" not in case or not (code is None or code == 0):
            raise
    sys.stdout.flush()
    os._exit(0)


def _serve(program: str) -> None:
    """Run the program, and let the judge use what it defines."""
    from plimsoll.process.assertions import Peer

    reads, writes = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    Peer(reads, writes, _run_program(program)).serve()


def _run_program(program: str) -> dict[str, Any]:
    """Run the program in this process, and return its names."""
    _set_dumpable(True)  # else /dev/stdin would be closed to it
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(program, "response", "exec"), space)
    return space


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


def _keep_files(files: Sequence[int | None]) -> None:
    """Make these this process's files 0, 1, ..., and close all others."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = [nowhere if file is None else file for file in files]
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_UNUSED) for file in kept]
    for place, file in enumerate(copies):
        os.dup2(file, place)
    for place in range(len(files), 3):
        os.dup2(nowhere, place)
    os.closerange(max(3, len(files)), 256)
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
