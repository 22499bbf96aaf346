"""A checked and planned run, from its first process to its last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.commands.planning import planned
from plimsoll.commands.shortage import explaining_shortage
from plimsoll.errors import PlimsollError
from plimsoll.memory.plan.plan import Plan
from plimsoll.run.output import tell
from plimsoll.spec.run_spec import RunSpec


def run(spec: RunSpec[Any], plan: Plan | str) -> None:
    """Train what the spec says; resumes where `run.resume` says so. plan: of its memory, or why
    there is none."""
    with explaining_shortage(spec):
        spec.job.load_loop().run(spec, planned(spec, plan))
    leave_report(Path(spec.run.directory))


def leave_report(directory: Path) -> None:
    """Write the report of a run that has ended. All that it is made of is saved: where it cannot be
    written, that is told, and is no failure of the run."""
    # It draws, which is no part of what a run holds in memory.
    from plimsoll.commands.report.report import report_run

    try:
        report_run(directory)
    except PlimsollError as error:
        tell(f"no report.html, which `plimsoll report {directory}` would write: {error}")
