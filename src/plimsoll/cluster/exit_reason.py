"""Errors for processes that died, hang or cannot start; they blame memory only with evidence.

They shorten Ray's reports and logs to what a person needs. Ray keeps two logs of each process,
`LOG.out` and `LOG.err`; a parameter `log` is this path without the suffix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from plimsoll.cluster.heartbeats import Hang
from plimsoll.errors import PlimsollError, WorkerDied
from plimsoll.machine.incident import Incident, OutOfMemory, Sighting
from plimsoll.resolve.engine_rules import rollout_engines, rollout_rules
from plimsoll.run.numbers import gigabytes
from plimsoll.run.output import LONGEST_LINE, matches_from_the_end
from plimsoll.sampler.protocol import ENGINE_ENDED, EngineSpec, rollout_build

SILENT = "its process ended without an error message: it was killed, or it crashed"
"""The reason in the message if nothing more is known of a death."""

_DETAIL = re.compile(r"Worker exit detail: (.*)", re.DOTALL)
_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,)]+)")
_CRASH = re.compile(r"((?:\*\*\* SIG\w+ received|Fatal Python error: ).*)")
_PRESSURE = re.compile(r"[^.\n]*(?:node running low on memory|due to memory pressure)[^\n]*")
_SHORTAGE = (
    *("out of memory", "OutOfMemory", "MemoryError", "Cannot allocate memory"),
    *("can't allocate memory", "not enough memory"),
)
"""Parts of messages of torch and the system that mean a lack of memory."""
_RAYLET_GONE = "Owner's node has crashed"
_FORGOTTEN = "all references to the actor were removed"
_UNREACHABLE = re.compile(r"actor \w+ is unavailable")
_NODE_GONE = re.compile(r"because its node has died\. Node Id: \w+(.*)", re.DOTALL)


def message(what: str, why: str, log: str) -> str:
    """Return a message of three lines: what happened, why, and the paths of the logs."""
    return f"{what}\n  Why: {why}\n  Logs: {log}.{{out,err}}"


def death_reason(report: str) -> str:
    """Return the reason, as one line, from Ray's long report of a dead actor."""
    if pressure := _PRESSURE.search(report):
        return f"Ray's memory monitor killed it: {pressure[0].strip()}"[:LONGEST_LINE]
    detail = _DETAIL.search(report)
    if _RAYLET_GONE in report:
        return "Ray's own process on the command's node (raylet) was killed, or it crashed"
    if _FORGOTTEN in report:  # the run keeps references until its end
        return (
            "Ray's head gave it up, since it cannot call this command back: is a firewall between "
            "them?"
        )
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
    """Return whether a reason of Ray's memory monitor, torch or an engine is a lack of memory."""
    engines = (words for rules in rollout_engines().values() for words in rules.shortages)
    return _PRESSURE.search(why) is not None or any(w in why for w in (*_SHORTAGE, *engines))


def failing_process(report: str) -> tuple[int, str] | None:
    """Return (pid, node address) of the process that failed first, or None if not reported.

    `report` is Ray's report of a failed call.
    """
    processes = _PROCESS.findall(report)
    return (int(processes[-1][0]), processes[-1][1]) if processes else None


def last_crash_line(log: str) -> str | None:
    """Return the log's last line that reports a crash of the interpreter, or None."""
    return next(matches_from_the_end(f"{log}.err", _CRASH), None)


_FULL = 0.95
"""A killed process counts as out of memory if this share of its node's memory was in use."""


def exit_reason(name: str, why: str, log: str, sighting: Sighting) -> PlimsollError:
    """Return the error of a process that ended without a request to stop.

    Args:
        name: the name of the process in messages.
        why: the reason, such as `death_reason` returns it.
        log: the path of its logs without suffix.
        sighting: the state of its node, as evidence for a lack of memory.
    """
    if says_out_of_memory(why):
        on_card = "CUDA" in why or "on device" in why
        return _out_of_memory(
            name, why, log, Incident("device" if on_card else "host", why), sighting
        )
    if why not in (SILENT, ENGINE_ENDED):
        return WorkerDied(message(f"{name} died", why, log))
    kills, evidence = _new_kills(sighting), None
    host = None if sighting.last is None else sighting.last.host
    if kills:
        some = "a process" if kills == 1 else f"{kills} processes"
        evidence = f"the kernel has killed {some} here for want of memory since the run began"
    elif host is not None and host.used >= _FULL * host.capacity:
        evidence = (
            f"{gigabytes(host.used)} of {gigabytes(host.capacity)} GB of its node's memory were "
        )
        evidence += "in use when it was last read"
    if evidence is not None:
        killed = f"it was killed: {evidence}"
        return _out_of_memory(name, killed, log, Incident("host", killed), sighting)
    doubt = "The kernel has killed nothing here for want of memory since the run began"
    if kills is None:
        doubt = "Whether memory ran out is not known; `dmesg` on its node shows it"
    return WorkerDied(message(f"{name} died", f"{why}. {doubt}", log))


def hang_error(hang: Hang, stopped: Sequence[str], logs: Mapping[str, str]) -> WorkerDied:
    """Return the error of a run that hangs.

    Args:
        hang: the silent processes, and for how long.
        stopped: the result of `ask_for_stacks`.
        logs: the logs of all ranks and engines (without suffix), by their names in messages.
    """
    first, *other_names = hang.silent or ("the run",)
    if hang.silent:
        what = f"it has not answered for {hang.seconds:.0f} s"
    else:
        what = (
            f"all ranks and engines answer, but for {hang.seconds:.0f} s none has computed, read "
            "or written; whom they wait for is not known"
        )
    parts = [f"{what} ({hang.allowed:.0f} s are allowed: cluster.hang_timeout)"]
    parts += [f"nor has {name}" for name in other_names]
    parts += [f"process {process} is stopped, as by `kill -STOP`" for process in stopped]
    log_lines = "".join(f"\n    {name}: {log}.err" for name, log in logs.items())
    return WorkerDied(
        f"{first} hangs\n  Why: {'; '.join(parts)}\n  Logs, which end with where their threads "
        f"are (but for what is stopped):{log_lines}"
    )


def start_error(spec: EngineSpec, reason: str, killed: bool, log: str) -> PlimsollError:
    """Return the error of an engine that could not start; `reason` is the engine's message.

    `killed` says whether the kernel killed a process for lack of memory meanwhile.
    """
    title = rollout_rules(spec.rollout).title
    what = f"rollout engine {spec.index}: {title} could not start"
    if killed:
        reason = f"the kernel has killed a process here for want of memory; {title} says: {reason}"
    settings = rollout_build(spec.rollout).memory_settings(spec)
    settings += f", longest prompt and response {spec.max_tokens} tokens, model {spec.model}"
    why = f"{reason}\n  Settings: {settings}"
    if not killed and not says_out_of_memory(reason):
        return PlimsollError(message(what, why, log))
    where: Literal["device", "host"] = "device" if spec.device == "cuda" and not killed else "host"
    return OutOfMemory(what, Incident(where, f"{title} could not start: {why}", "rollout"))


def _out_of_memory(
    name: str, why: str, log: str, incident: Incident, sighting: Sighting
) -> OutOfMemory:
    text = message(f"{name} died for want of {incident.where} memory", why, log)
    return OutOfMemory(text, incident).with_sighting(text, sighting)


def _new_kills(sighting: Sighting) -> int | None:
    counts = [state.kills for state in (sighting.before, sighting.after) if state is not None]
    if len(counts) < 2 or counts[0] is None or counts[1] is None:
        return None
    return counts[1] - counts[0]
