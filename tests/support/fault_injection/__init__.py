"""Inject faults at named points of a run, to test that the run survives them.

    PLIMSOLL_FAULTS=rank.backward:kill:step=3+rank=1+once,reward.call:delay=2:p=0.1+seed=7

Each fault is `point:kind` or `point:kind:when`. `POINTS` and `KINDS` list what exists; `when` is
one condition or several, joined by `+`, and all of them must hold. The points call this package
through plimsoll.machine.faults.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TypeVar

from fault_injection.grammar import Fault, faults_directory, parse_faults
from fault_injection.points import NOTE
from fault_injection.spoil import spoil
from plimsoll.errors import PlimsollError
from plimsoll.machine.faults import FAULTS, PROCESS

V = TypeVar("V")

FIRED = "fired.jsonl"
"""The file in the directory with one row for each fault that has happened."""
_TORN_BYTES = 100
"""How much `torn` cuts off: less than one row of metrics, more than the end of a Parquet file."""


def fail(name: str, step: int | None, path: Path | None) -> None:
    """Let the faults of a point happen; see `plimsoll.machine.faults.fault_point`."""
    for fault in _due(name, step):
        _act(fault, path)


async def await_failure(name: str, step: int | None) -> None:
    """Do what `fail` does, and let other coroutines go on while a call waits."""
    for fault in _due(name, step):
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "hang" and fault.point.asks:
            await asyncio.Event().wait()
        else:
            _act(fault, None)


def fail_or_spoil(name: str, value: V, step: int | None) -> V:
    """Return the value, or a wrong copy of it if a fault says so; or fail."""
    for fault in _due(name, step):
        if fault.kind == "wrong":
            value = spoil(value)
        else:
            _act(fault, None)
    return value


@dataclass(frozen=True)
class _Loaded:
    """The faults of this process.

    Attributes:
        faults: The faults, by their point.
        calls: How often the process has reached each point with faults.
        earlier: The number of faults before this process read them. A process that is started
            again thereby draws other numbers for `p`.
    """

    faults: Mapping[str, Sequence[Fault]]
    calls: Mapping[str, Iterator[int]]
    earlier: int


@cache
def _load(text: str, directory: Path | None) -> _Loaded:
    by_point: dict[str, list[Fault]] = {}
    for fault in parse_faults(text):
        by_point.setdefault(fault.point.name, []).append(fault)
    earlier = 0
    if directory:
        with suppress(FileNotFoundError):
            earlier = len((directory / FIRED).read_bytes().splitlines())
    return _Loaded(by_point, {name: count(1) for name in by_point}, earlier)


def _due(name: str, step: int | None) -> Iterator[Fault]:
    """Yield the faults that happen now, each after it is recorded."""
    if not (text := os.environ.get(FAULTS)):
        return
    loaded = _load(text, faults_directory())
    if name not in loaded.faults:
        return
    call = next(loaded.calls[name])
    for fault in loaded.faults[name]:
        if fault.is_due(step, call, loaded.earlier) and _claim(fault):
            _record(fault, step, call)
            yield fault


def _act(fault: Fault, path: Path | None) -> None:
    """Let a fault of any kind but `wrong` happen."""
    message = f"injected by {FAULTS}: {fault.text}"
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "hang" and fault.point.asks:
        while True:
            time.sleep(3600)
    elif fault.kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "torn":
        _tear(path)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind != NOTE:
        raise _ERRORS[fault.kind](message)


def _shortage(message: str) -> Exception:
    torch = sys.modules.get("torch")
    text = f"CUDA out of memory. Tried to allocate 512.00 MiB ({message})"
    return MemoryError(message) if torch is None else torch.OutOfMemoryError(text)


_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "error": RuntimeError,
    "oom": _shortage,
    "full": lambda message: OSError(errno.ENOSPC, f"No space left on device ({message})"),
    "network": lambda message: ConnectionResetError(errno.ECONNRESET, message),
}


def _tear(path: Path | None) -> None:
    """Cut off the end of a file, or of the largest file of a directory, as a crash may do."""
    if path is None:
        raise PlimsollError(f"{FAULTS}: this point gives no file, so `torn` cannot cut one")
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    if files:
        largest = max(files, key=lambda file: file.stat().st_size)
        size = largest.stat().st_size
        os.truncate(largest, size - min(_TORN_BYTES, size // 2))


def _claim(fault: Fault) -> bool:
    """Return whether a fault may happen; note a fault with `once` as done, for all processes."""
    if "once" not in fault.conditions:
        return True
    directory = faults_directory()
    assert directory is not None, "parsing has checked it"
    directory.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (directory / f"{fault.text}.done").touch(exist_ok=False)
        return True
    return False


def _record(fault: Fault, step: int | None, call: int) -> None:
    """Write the fault to stderr, and as a row to the directory if there is one."""
    process = os.environ.get(PROCESS) or "controller"
    row = {"time": time.time(), "fault": fault.text, "process": process, "pid": os.getpid()}
    if fault.kind != NOTE:
        print(
            f"{FAULTS}: {fault.text} in {process} (pid {os.getpid()})", file=sys.stderr, flush=True
        )
    if directory := faults_directory():
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / FIRED).open("a") as file:
            file.write(json.dumps(row | {"step": step, "call": call}) + "\n")
