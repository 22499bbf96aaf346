"""Run a checked and planned job, and write its report.

If the run exhausts its memory, the error explains why, and says which settings would have fitted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from plimsoll.commands.planning import constants_of, hardware_of, summarize_plan
from plimsoll.errors import CheckpointDamaged, ConfigError, PlimsollError
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.memory.explain import explain, explanation_text
from plimsoll.memory.weigh import Plan
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.ending import notes_of
from plimsoll.run.files import write_whole
from plimsoll.run.output import tell
from plimsoll.run.readings import Planned


def run(spec: RunSpec[Any], plan: Plan | str) -> None:
    """Run the job of a spec, then write its report.

    `plan` is the memory plan, or a text that says why there is none. An OutOfMemory gets an
    explanation, which is also written to the run directory.
    """
    directory = RunDirectory(Path(spec.run.directory))
    try:
        planned = replace(summarize_plan(spec, plan), explain=partial(explanation_of, spec))
        _run_from_a_whole_checkpoint(spec, planned)
    except OutOfMemory as error:
        if error.incident.phase is None:
            raise
        text = f"{error}\n{explanation_of(spec, error.incident, error.incident.phase)}"
        write_whole(directory.out_of_memory_path, f"{text}\n")
        where = f"This is in {directory.out_of_memory_path}, too."
        explained = OutOfMemory(f"{text}\n{where}", error.incident)
        for note in notes_of(error):
            explained.add_note(note)
        raise explained from error
    leave_report(directory.path)


def _run_from_a_whole_checkpoint(spec: RunSpec[Any], planned: Planned) -> None:
    """Run the job, again from an earlier checkpoint for each that ranks find damaged."""
    while True:
        try:
            spec.job.load_loop().run(spec, planned)
        except CheckpointDamaged as error:
            tell(str(error))
        else:
            return


def leave_report(directory: Path) -> None:
    """Write the report of a run that has ended; print why it cannot be written."""
    # Imported only now: the plan of a run does not count the memory of code that draws.
    from plimsoll.commands.report import report_run

    try:
        report_run(directory)
    except Exception as error:  # noqa: BLE001  no page is worth a run that is done
        why = str(error) if isinstance(error, PlimsollError) else repr(error)
        tell(f"no report.html, which `plimsoll report {directory}` would write: {why}")


def explanation_of(spec: RunSpec[Any], incident: Incident, phase: str) -> str:
    """Return a text that explains an incident, or says why no explanation is possible."""
    hardware, constants = hardware_of(spec.cluster), constants_of(spec.cluster)
    try:
        return explanation_text(explain(spec, hardware, constants, incident, phase))
    except ConfigError as error:
        return f"no plan of memory to hold this against: {error}"
