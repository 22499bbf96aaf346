"""A program and its cases, given to a process of their own (runner.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.reward.sandbox import confine
from plimsoll.reward.sandbox.runner import UNCONFINED

_RUNNER = Path(__file__).with_name("runner.py")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_UNCONFINED = (
    "Programs of a policy are run only where the kernel confines them by seccomp: on Linux, x86-64 "
    "or ARM64. Serve this reward from such a machine with `plimsoll serve-reward`"
)
_SLACK_SECONDS = 20.0  # of the runner itself, on a busy machine


@dataclass(frozen=True)
class Bounds:
    """seconds: of the processor, for one case (rounded up); of the clock it gets twice as many.
    total_seconds: of the clock, for all."""

    seconds: float
    total_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Ended:
    """How a case ended: `done` is by itself, and, of a check, at its last line. output: what a
    program wrote; or, of a call, what it gave as JSON."""

    how: Literal["done", "error", "time"]
    output: str


def run(program: str, cases: Sequence[Mapping[str, object]], bounds: Bounds) -> list[Ended]:
    """Run a Python program once for each case, each time in a new process.

    cases: `{"input": text}`, which the program reads; `{"call": name, "arguments": [...]}`, a
    function that it defines; or `{"check": text}`, which is run after it.

    Raises ConfigError where this machine cannot keep a program within limits, and PlimsollError
    where the process that runs it fails.
    """
    if not confine.is_known():
        raise ConfigError(_UNCONFINED)
    job = {
        "program": program,
        "cases": [*cases],
        "seconds": bounds.seconds,
        "total_seconds": bounds.total_seconds,
        "memory_bytes": bounds.memory_bytes,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-B", str(_RUNNER)],
            input=json.dumps(job).encode(),
            capture_output=True,
            timeout=bounds.total_seconds + _SLACK_SECONDS,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise PlimsollError("The process that runs programs did not answer") from error
    if done.returncode == UNCONFINED:
        raise ConfigError(_UNCONFINED)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise PlimsollError(
            f"The process that runs programs ended with code {done.returncode}: {last}"
        )
    return [Ended(one["ended"], one["output"]) for one in json.loads(done.stdout)]
