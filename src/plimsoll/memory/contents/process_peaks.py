"""The planned peaks of each process, which the ledger compares with the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from plimsoll.memory.contents.contents import PlannedJob, contents_of
from plimsoll.memory.contents.layout import Process
from plimsoll.memory.contents.stores import Use, uses_of
from plimsoll.resolve.run_spec import Phase
from plimsoll.run.readings import Footprint, Footprints
from plimsoll.timeline.items import Allocation, Where


def process_peaks(job: PlannedJob) -> dict[str, Footprints]:
    """Return a dict from process (by its name in the ledger) and phase to the planned peaks.

    Each number is the largest of all instants of the phase. The front and the workers of an engine
    are one process: host bytes are summed, and the fullest card counts. `device` includes other
    processes on the card. `eval` repeats the phase that does the same work: sampling, or else
    scoring. Ray's own processes are left out, because they are not measured.
    """
    read = [process for process in job.layout.processes if process.kind != "ray"]
    return {
        name: _with_eval(_combine([_phases(job, process) for process in processes]))
        for name, processes in groupby(read, key=reading_name)
    }


def reading_name(process: Process) -> str:
    """Return the name of a process in the ledger's readings; a worker has its engine's name."""
    return f"engine {process.index}" if process.kind == "engine worker" else process.name


def _phases(job: PlannedJob, process: Process) -> Footprints:
    contents = contents_of(job, process)
    host = _by_phase(contents, "host")
    if process.slot.card is None:
        return {phase: Footprint(_most(uses)) for phase, uses in host.items()}
    gap = job.constants.allocator_gap
    sharing = (p for p in job.layout.processes if p.slot == process.slot)
    on_card = [held for p in sharing for held in contents_of(job, p)]
    device, card = _by_phase(contents, "device", gap), _by_phase(on_card, "device", gap)
    return {
        phase: Footprint(
            host=_most(uses),
            allocated=max((use.allocated for use in device.get(phase, ())), default=0),
            reserved=max((use.reserved for use in device.get(phase, ())), default=0),
            device=_most(card.get(phase, ())),
        )
        for phase, uses in host.items()
    }


def _by_phase(held: Iterable[Allocation], where: Where, gap: float = 0.0) -> dict[Phase, list[Use]]:
    uses: dict[Phase, list[Use]] = {}
    for use in uses_of((a for a in held if a.item.where == where), gap):
        uses.setdefault(use.moment.phase, []).append(use)
    return uses


def _most(uses: Iterable[Use]) -> int:
    return max((use.bytes for use in uses), default=0)


def _combine(parts: list[Footprints]) -> Footprints:
    """Return the footprints of several processes together: host bytes summed, the fullest card."""
    if len(parts) == 1:
        return parts[0]
    return {
        phase: replace(
            max((part[phase] for part in parts), key=lambda footprint: footprint.device or 0),
            host=sum(part[phase].host for part in parts),
        )
        for phase in parts[0]
    }


def _with_eval(phases: Mapping[str, Footprint]) -> Footprints:
    same = next((phase for phase in ("rollout", "score") if phase in phases), None)
    return dict(phases) | ({} if same is None else {"eval": phases[same]})
