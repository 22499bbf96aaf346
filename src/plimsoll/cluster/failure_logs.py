"""What Ray and a process's logs say of a failure, cut down to what a person needs to know.

Ray keeps two logs of each process, `LOG.out` and `LOG.err`; a log is named here without suffix.
"""

from __future__ import annotations

import re

from plimsoll.run.log_tail import LONGEST_LINE, matches_from_the_end

SILENT = "its process ended without a word: it was killed, or it crashed"
"""The reason that is given for a death of which nothing more is known."""

_DETAIL = re.compile(r"Worker exit detail: (.*)", re.DOTALL)
_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,)]+)")
_CRASH = re.compile(r"((?:\*\*\* SIG\w+ received|Fatal Python error: ).*)")
_PRESSURE = re.compile(r"[^.\n]*(?:node running low on memory|due to memory pressure)[^\n]*")
_SHORTAGE = re.compile(
    r"Free memory on device|No available memory for the cache blocks|requested memory for kv|"
    r"larger than the available KV cache|out of memory|OutOfMemory|MemoryError|"
    r"can't allocate memory|not enough memory|Cannot allocate memory"
)
_RAYLET_GONE = "Owner's node has crashed"
_UNREACHABLE = re.compile(r"actor \w+ is unavailable")
_NODE_GONE = re.compile(r"because its node has died\. Node Id: \w+(.*)", re.DOTALL)


def message(what: str, why: str, log: str) -> str:
    """Return a message of several lines: what happened, why, and where more is to be read."""
    return f"{what}\n  Why: {why}\n  Logs: {log}.{{out,err}}"


def death_reason(report: str) -> str:
    """Return the reason alone from Ray's report of a dead actor."""
    if pressure := _PRESSURE.search(report):
        return f"Ray's memory monitor killed it: {pressure[0].strip()}"[:LONGEST_LINE]
    detail = _DETAIL.search(report)
    if _RAYLET_GONE in report:
        return "Ray's own process on the command's node (raylet) was killed, or it crashed"
    if _UNREACHABLE.search(report):
        return "it cannot be reached: Ray's process on its node (raylet), or all of it, is gone"
    if node := _NODE_GONE.search(report):
        return " ".join(f"its node is gone: {node[1]}".split()).rstrip(":")[:LONGEST_LINE]
    if detail is None:  # Ray itself failed: the report's last lines say why
        return " ".join(report.split())[-LONGEST_LINE:]
    if "unexpectedly exits with a connection error" in detail[1]:
        return SILENT
    return " ".join(detail[1].split())[:LONGEST_LINE]


def says_out_of_memory(why: str) -> bool:
    """Return whether Ray's memory monitor, vLLM or torch says that there was too little memory."""
    return _PRESSURE.search(why) is not None or _SHORTAGE.search(why) is not None


def failing_process(report: str) -> tuple[int, str] | None:
    """Return (pid, node) of the process that failed first, from Ray's report of a failed call."""
    processes = _PROCESS.findall(report)
    return (int(processes[-1][0]), processes[-1][1]) if processes else None


def last_crash_line(log: str) -> str | None:
    """Return the last line in which the interpreter reports its crash; None without one."""
    return next(matches_from_the_end(f"{log}.err", _CRASH), None)
