"""What a run leaves for people at its end."""

from __future__ import annotations

from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.run.output import tell


def leave_report(directory: Path) -> None:
    """Write the report of a run that has ended. All that it is made of is saved: where it cannot be
    written, that is told, and is no failure of the run."""
    from plimsoll.commands.report import report_run  # draws: no part of what a run holds in memory

    try:
        report_run(directory)
    except PlimsollError as error:
        tell(f"no report.html, which `plimsoll report {directory}` would write: {error}")
