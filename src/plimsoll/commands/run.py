"""A checked and planned run, from its first process to its last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.commands.leaving import leave_report
from plimsoll.commands.planning import planned
from plimsoll.commands.shortage import explaining_shortage
from plimsoll.memory.plan.plan import Plan
from plimsoll.spec.run_spec import RunSpec


def run(spec: RunSpec[Any], plan: Plan | str) -> None:
    """Train what the spec says; resumes where `run.resume` says so. plan: of its memory, or why
    there is none."""
    with explaining_shortage(spec):
        spec.job.load_loop().run(spec, planned(spec, plan))
    leave_report(Path(spec.run.directory))
