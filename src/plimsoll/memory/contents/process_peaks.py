"""What the plan says of each single process: what the ledger holds against the measured peaks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from plimsoll.memory.contents.contents import Job, held_by
from plimsoll.memory.contents.layout import Process
from plimsoll.memory.contents.stores import Use, uses_of
from plimsoll.run.readings import Footprint, Footprints
from plimsoll.spec.run_spec import Phase
from plimsoll.timeline.items import Allocation, Where


def process_peaks(job: Job) -> dict[str, Footprints]:
    """By process, as the ledger calls it, and phase: each number's largest over the instants.

    An engine is its front and its workers together, and of their cards the fullest. `device` is
    of the whole card: other processes' share of it too. `eval` is the phase of the plan that does
    the same: sampling, or else scoring. Ray's own processes are left out: nobody reads them.
    """
    read = [process for process in job.layout.processes if process.kind != "ray"]
    return {
        name: _with_eval(_together([_phases(job, process) for process in processes]))
        for name, processes in groupby(read, key=read_as)
    }


def read_as(process: Process) -> str:
    """The name under which a process is read."""
    return f"engine {process.index}" if process.kind == "engine worker" else process.name


def _phases(job: Job, process: Process) -> Footprints:
    own = held_by(job, process)
    host = _by_phase(own, "host")
    if process.slot.card is None:
        return {phase: Footprint(_most(uses)) for phase, uses in host.items()}
    gap = job.constants.allocator_gap
    beside = (other for other in job.layout.processes if other.slot == process.slot)
    on_card = [one for other in beside for one in held_by(job, other)]
    device, card = _by_phase(own, "device", gap), _by_phase(on_card, "device", gap)
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
    found: dict[Phase, list[Use]] = {}
    for use in uses_of((one for one in held if one.item.where == where), gap):
        found.setdefault(use.moment.phase, []).append(use)
    return found


def _most(uses: Iterable[Use]) -> int:
    return max((use.bytes for use in uses), default=0)


def _together(parts: list[Footprints]) -> Footprints:
    """The host's bytes added up; of the cards the fullest."""
    if len(parts) == 1:
        return parts[0]
    return {
        phase: replace(
            max((part[phase] for part in parts), key=lambda one: one.device or 0),
            host=sum(part[phase].host for part in parts),
        )
        for phase in parts[0]
    }


def _with_eval(phases: Mapping[str, Footprint]) -> Footprints:
    same = next((phase for phase in ("rollout", "score") if phase in phases), None)
    return dict(phases) | ({} if same is None else {"eval": phases[same]})
