"""The process that runs one program against its cases; started by run.py, by its path.

It reads one JSON object from standard input and writes one JSON list to standard output. For each
case it forks, and the child gives up what confine.py says, runs program and case, and writes what
they gave to a file in memory, which this process reads. It waits for each child at most twice
`seconds`, for all of them at most `total_seconds`, and ends with its parent. Imports the standard
library alone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

_OUTPUT_BYTES = 4 * 1024**2
UNCONFINED = 3
"""The exit code where the kernel keeps no limits."""
_RESULT = 3  # where a child writes what a call gave


def main() -> None:
    """Run all cases."""
    confine.end_with_parent()
    if not _can_confine():
        sys.exit(UNCONFINED)
    job = json.load(sys.stdin)
    until = time.monotonic() + job["total_seconds"]
    results = []
    for case in job["cases"]:
        seconds = min(2 * job["seconds"], until - time.monotonic())
        results.append(_run(job, case, seconds) if seconds > 0 else _ended("time"))
    json.dump(results, sys.stdout)


def _can_confine() -> bool:
    """Whether the kernel lets a process give up what it must."""
    child = os.fork()
    if child == 0:
        try:
            confine.confine()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _run(job: dict[str, Any], case: dict[str, Any], seconds: float) -> dict[str, str]:
    """One case in a child. A check that came to its end has written a word that nobody knew."""
    result, word = os.memfd_create("result"), os.urandom(16).hex()
    child = os.fork()
    if child == 0:
        try:
            _child(job, case, result, word)
        finally:
            os._exit(1)
    try:
        ended = _wait(child, seconds)
        output = os.pread(result, _OUTPUT_BYTES, 0).decode("utf-8", "replace")
    finally:
        os.close(result)
    if ended == "done" and "check" in case and output != word:
        ended = "error"
    return _ended(ended, output)


def _ended(how: str, output: str = "") -> dict[str, str]:
    return {"ended": how, "output": output}


def _wait(child: int, seconds: float) -> str:
    watched = os.pidfd_open(child)
    try:
        in_time = bool(select.select([watched], [], [], seconds)[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(watched)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time or code == -signal.SIGXCPU:
        return "time"
    return "done" if code == 0 else "error"


def _child(job: dict[str, Any], case: dict[str, Any], result: int, word: str) -> None:
    """What becomes of the fork: it never returns to the runner's own work."""
    confine.end_with_parent()
    _open_streams(str(case.get("input", "")), result, to_output="input" in case)
    confine.limit(math.ceil(job["seconds"]), job["memory_bytes"], _OUTPUT_BYTES)
    confine.confine()
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(job["program"], "response", "exec"), space)
        if "call" in case:
            _write(_called(space, case["call"], case["arguments"]))
        elif "check" in case:
            exec(compile(case["check"], "tests", "exec"), space)
            _write(word)
    except SystemExit as leaving:  # as many programs end
        code = leaving.code
        if "input" not in case or not (code is None or code == 0):
            raise
    sys.stdout.flush()
    os._exit(0)


def _open_streams(text: str, result: int, to_output: bool) -> None:
    """Standard input with the text, output to the result or nowhere, nothing else open."""
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


def _called(space: dict[str, Any], name: str, arguments: list[Any]) -> str:
    """What the function gives, or the method of a class Solution, as JSON."""
    function = space[name] if name in space else getattr(space["Solution"](), name)
    value = function(*arguments)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return json.dumps(repr(value))


def _write(text: str) -> None:
    os.write(_RESULT, text.encode())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    confine: Any = importlib.import_module("confine")
    sys.path.pop(0)
    main()
