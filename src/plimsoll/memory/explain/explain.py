"""The reasons why a run ran out of memory, as a record and as text of 80 columns.

An explanation has predicted and measured bytes, four answers, and the smallest change that helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.machine.hardware import Hardware, Node
from plimsoll.machine.incident import Incident
from plimsoll.memory.advise import Suggestion, change_lines, smallest_change
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.memory.contents.layout import Process, Slot
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.process_peaks import process_peaks, reading_name
from plimsoll.memory.contents.stores import Store, Use, fullest
from plimsoll.memory.explain.questions import Finding, Scene, answer_questions, models_of, room_of
from plimsoll.memory.plan import wrap_lines
from plimsoll.memory.weigh import Ground, weigh
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.readings import Footprint
from plimsoll.timeline.items import Item, Where

_SHOWN = 6
_ROLES = {
    "precompute": "reference",
    "train_actor": "actor",
    "train_critic": "critic",
    "rollout": "rollout",
}
_SAME = {"eval": ("rollout", "score")}
"""Phases that the plan has under another name."""


@dataclass(frozen=True)
class Explanation:
    """The reasons why a process ran out of memory, and a change that would have fitted."""

    incident: Incident
    """The incident as it was seen."""
    phase: str
    """The phase of the run."""
    role: str
    """The role that ran out of memory, or the roles that it may have been."""
    predicted: Footprint | None
    """The planned bytes of the process in that phase; None in phases without a plan."""
    measured: Footprint | None
    """The bytes of the process when it failed, or when it was last read."""
    at_failure: bool
    """Whether it was measured when it failed."""
    store: Store
    """The card or host."""
    items: tuple[Item, ...]
    """The largest items that the plan has there in that phase."""
    findings: tuple[Finding, Finding, Finding, Finding]
    """The answers to the four questions."""
    room: int
    """The largest planned peak, in bytes, with which the run would have fitted."""
    change: Suggestion | None
    """The smallest change that fits in this room; None if nothing was found."""

    @property
    def should_have_fitted(self) -> bool:
        """Whether the plan's peak was available, and the process held no more than planned."""
        return self.findings[0].verdict == "no" and self.room == self.store.peak.bytes


def explain(
    spec: RunSpec[Any], hardware: Hardware, constants: Constants, incident: Incident, phase: str
) -> Explanation:
    """Return why a process ran out of memory, and the smallest change that would have fitted.

    Args:
        spec: the run.
        hardware: the machines of the plan that the run was started with.
        constants: the constants of that plan.
        incident: the incident, as the cluster saw it.
        phase: the phase in which it happened.

    Raises ConfigError for a model whose shape cannot be known.
    """
    scene = scene_of(spec, hardware, constants, incident, phase)
    seen, room = scene.seen, room_needed(scene)
    predicted = process_peaks(scene.job).get(seen.process, {})
    return Explanation(
        incident=incident,
        phase=phase,
        role=role_of(scene, phase),
        predicted=predicted.get(phase),
        measured=_measured(scene),
        at_failure=incident.held is not None,
        store=scene.store,
        items=scene.use.items[:_SHOWN],
        findings=answer_questions(scene),
        room=room,
        change=smallest_change(spec, Ground(_with_room(hardware, scene.store, room), constants)),
    )


def scene_of(
    spec: RunSpec[Any], hardware: Hardware, constants: Constants, incident: Incident, phase: str
) -> Scene:
    """Return the card or host where memory ran out. Parameters and errors as in `explain`."""
    assert incident.seen is not None
    plan = weigh(spec, Ground(hardware, constants))
    job = plan.job
    where: Where = incident.where if plan.devices else "host"
    stores = plan.devices if where == "device" else plan.hosts
    slots = {_on(process.slot, where) for process in _processes(job, incident.seen.process)}
    store = next((store for store in stores if slots & set(store.slots)), stores[0])
    here = store.slots[0]  # all slots of a store are equal
    planned = tuple(p for p in job.layout.processes if _on(p.slot, where) == here)
    return Scene(job, incident, incident.seen, store, _use(store, phase), planned)


def role_of(scene: Scene, phase: str) -> str:
    """Return the role that ran out of memory, or all possible roles joined by "or"."""
    known = scene.incident.role or _ROLES.get(phase)
    return known or " or ".join(models_of(scene.job, _processes(scene.job, scene.seen.process)))


def room_needed(scene: Scene) -> int:
    """Return the largest planned peak, in bytes, with which the run would have fitted.

    This is the room of the card or host, divided by the ratio of measured to predicted bytes if
    the process held too much. It is at most the peak of this plan, and equal to it if the room is
    unknown.
    """
    need, room = scene.store.peak.bytes, room_of(scene)
    return need if room is None else max(1, min(need, int(room / _excess(scene))))


def _excess(scene: Scene) -> float:
    """Return the measured bytes divided by the largest predicted bytes; at least 1."""

    def size(footprint: Footprint) -> int:
        return footprint.host if scene.store.where == "host" else footprint.fullest

    predicted = process_peaks(scene.job).get(scene.seen.process, {})
    most, measured = max(map(size, predicted.values()), default=0), _measured(scene)
    return max(1.0, size(measured) / most) if measured and most else 1.0


def _measured(scene: Scene) -> Footprint | None:
    last = scene.seen.last
    return scene.incident.held or (None if last is None else last.held)


def _on(slot: Slot, where: Where) -> Slot:
    """Return the slot itself for a device, or its node's slot for a host."""
    return slot if where == "device" else Slot(slot.node)


def _processes(job: PlannedJob, name: str) -> list[Process]:
    return [process for process in job.layout.processes if reading_name(process) == name]


def _use(store: Store, phase: str) -> Use:
    """Return the fullest instant of the phase; of all phases if the plan does not have it."""
    names = _SAME.get(phase, (phase,))
    uses = [use for use in store.phases if use.moment.phase in names]
    return fullest(uses or store.phases)


def _with_room(hardware: Hardware, store: Store, room: int) -> Hardware:
    """Return the hardware with `room` bytes on each host, or at most `room` on each card."""

    def smaller(node: Node) -> Node:
        if store.where == "host":
            return replace(node, host_bytes=room)
        cards = (replace(card, usable_bytes=min(card.usable_bytes, room)) for card in node.cards)
        return replace(node, cards=tuple(cards))

    return Hardware(tuple(smaller(node) for node in hardware.nodes))


_NAMES = {
    "allocated": "allocated by torch",
    "reserved": "reserved by torch",
    "device": "used on the card by all",
    "host": "host",
}


def explanation_text(explanation: Explanation) -> str:
    """Return the explanation as text of several lines."""
    return "\n".join(
        [
            *_where(explanation),
            *_measures(explanation),
            *_items(explanation),
            *_findings(explanation),
            *_change(explanation),
        ]
    )


def _where(explanation: Explanation) -> Iterator[str]:
    seen = explanation.incident.seen
    assert seen is not None
    where = f"{explanation.incident.where} memory of {seen.process}, node {seen.node}"
    yield _wrap(f"Where: {where}; phase {explanation.phase}, role {explanation.role}")
    if explanation.incident.asked is not None:
        yield f"Asked for: {gigabytes_text(explanation.incident.asked)} more"


def _measures(explanation: Explanation) -> Iterator[str]:
    """Yield the measured and the predicted bytes of the process."""
    when = "when it failed" if explanation.at_failure else "when it was last read"
    measured = explanation.measured
    if measured is None:
        yield "Measured: nothing, because it failed before it was first read"
    else:
        yield _wrap(f"Measured {when}: {_footprint(measured)}")
    if explanation.predicted is None:
        yield f"Predicted: nothing, because the plan has no phase {explanation.phase}"
    else:
        yield _wrap(f"Predicted for the phase: {_footprint(explanation.predicted)}")


def _footprint(footprint: Footprint) -> str:
    sizes = ((words, getattr(footprint, name)) for name, words in _NAMES.items())
    return ", ".join(f"{gigabytes_text(s)} {words}" for words, s in sizes if s is not None)


def _items(explanation: Explanation) -> Iterator[str]:
    yield f"The largest items of the {explanation.store.place} in this phase, as predicted:"
    for item in explanation.items:
        yield f"  {gigabytes_text(item.bytes):>8}  {item.role} {item.name}"


def _findings(explanation: Explanation) -> Iterator[str]:
    for number, finding in enumerate(explanation.findings, 1):
        yield f"{number}. {finding.question} {finding.verdict}:"
        yield wrap_lines(f"   {finding.text}", "   ")


def _change(explanation: Explanation) -> Iterator[str]:
    if explanation.should_have_fitted:
        yield _wrap(
            "By these numbers it should have fitted: look for a limit on the process (ulimit -v, a "
            "cgroup), or for a peak that the plan does not have."
        )
    room, change = gigabytes_text(explanation.room), explanation.change
    place = explanation.store.place
    if change is None:
        yield _wrap(
            f"No change that was tried brings the {place}'s peak under {room}: it takes more "
            f"memory, or more nodes."
        )
        return
    yield _wrap(f"The smallest change that brings the {place}'s peak under {room}, by the plan:")
    yield from change_lines(change)


def _wrap(text: str) -> str:
    return wrap_lines(text, "  ")
