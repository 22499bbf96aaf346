"""Why a run ran out of memory: predicted against measured, four answers, the smallest repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.config.jobs import JobConfig
from plimsoll.memory.advise.advise import Suggestion, smallest_change
from plimsoll.memory.explain.incident import Incident
from plimsoll.memory.explain.questions import Answer, Scene, four_answers, room_of
from plimsoll.memory.items import Item
from plimsoll.memory.machine.hardware import Hardware, Node
from plimsoll.memory.plan.contents import Job, hosted, make_job
from plimsoll.memory.plan.layout import Process, Slot
from plimsoll.memory.plan.peaks import Use, fullest
from plimsoll.memory.plan.plan import make_plan
from plimsoll.memory.plan.process_peaks import process_peaks, read_as
from plimsoll.memory.plan.stores import Store
from plimsoll.memory.price.overheads import Constants
from plimsoll.run.readings import Footprint

_SHOWN = 6
_ROLES = {"train_actor": "actor", "train_critic": "critic", "rollout": "rollout"}
_SAME = {"eval": ("rollout", "score")}
"""Phases that the plan has under another name."""


@dataclass(frozen=True)
class Explanation:
    """incident: as it was seen. phase: of the run. role: whose memory, or those it may have been.

    predicted: of the process in that phase; None in phases without a plan. measured: when it
    failed, or where at_failure is False, when it was last read. store: the card or host; items: the
    largest that the plan has on it in that phase. answers: to the four questions. change: what asks
    for least and fits in `room` bytes, by the plan's reckoning; None where nothing was found.
    """

    incident: Incident
    phase: str
    role: str
    predicted: Footprint | None
    measured: Footprint | None
    at_failure: bool
    store: Store
    items: tuple[Item, ...]
    answers: tuple[Answer, Answer, Answer, Answer]
    room: int
    change: Suggestion | None


def explain(
    config: JobConfig, hardware: Hardware, constants: Constants, incident: Incident, phase: str
) -> Explanation:
    """Explain an incident that the cluster has seen, in a phase of the run.

    hardware, constants: of the plan that the run was started with. Raises ConfigError for a model
    whose shape cannot be known.
    """
    assert incident.seen is not None
    job, seen = make_job(config, hardware, constants), incident.seen
    stores = make_plan(config, hardware, constants)
    store = _store(job, stores.devices if incident.where == "device" else stores.hosts, incident)
    use = _use(store, phase)
    scene = Scene(job, incident, seen, store, use, tuple(_planned(job, store)))
    last = None if seen.last is None else seen.last.held
    measured = incident.held or last
    room = _room(scene, measured)
    return Explanation(
        incident=incident,
        phase=phase,
        role=incident.role or _ROLES.get(phase) or _hosted(job, seen.process),
        predicted=process_peaks(job).get(seen.process, {}).get(phase),
        measured=measured,
        at_failure=incident.held is not None,
        store=store,
        items=use.items[:_SHOWN],
        answers=four_answers(scene),
        room=room,
        change=smallest_change(config, _with_room(hardware, store, room), constants),
    )


def _named(job: Job, name: str) -> list[Process]:
    return [process for process in job.layout.processes if read_as(process) == name]


def _store(job: Job, stores: Sequence[Store], incident: Incident) -> Store:
    """Where the plan has the process; the first, where it has no place for it."""
    assert incident.seen is not None
    slots = [process.slot for process in _named(job, incident.seen.process)]
    if incident.where == "host":
        slots = [Slot(slot.node) for slot in slots]
    return next((one for one in stores if set(slots) & set(one.slots)), stores[0])


def _planned(job: Job, store: Store) -> list[Process]:
    """The processes on the first of the store's places: it stands for all."""
    slot = store.slots[0]
    on_host = store.where == "host"
    return [p for p in job.layout.processes if (Slot(p.slot.node) if on_host else p.slot) == slot]


def _use(store: Store, phase: str) -> Use:
    """The fullest instant of the phase; of all, where the plan does not have the phase."""
    names = _SAME.get(phase, (phase,))
    uses = [use for use in store.phases if use.moment.phase in names]
    return fullest(uses or store.phases)


def _hosted(job: Job, name: str) -> str:
    """The roles that live in a process."""
    roles: dict[str, None] = {}
    for process in _named(job, name):
        if process.kind in ("local", "rank", "critic rank"):
            roles |= dict.fromkeys(hosted(job, process))
        else:
            roles["rollout"] = None
    return " or ".join(roles) or "none"


def _room(scene: Scene, measured: Footprint | None) -> int:
    """What a plan may need so that it would have fitted.

    Never more than what this plan needs, for that was too much. Where the process held more than
    was predicted, the plan needs that much less room than there is.
    """
    need = scene.store.peak.bytes
    room = room_of(scene)
    return need if room is None else min(need, int(room / _shortfall(scene, measured)))


def _shortfall(scene: Scene, measured: Footprint | None) -> float:
    predicted = max(
        (one.fullest for one in process_peaks(scene.job).get(scene.seen.process, {}).values()),
        default=0,
    )
    if measured is None or not predicted:
        return 1.0
    return max(1.0, measured.fullest / predicted)


def _with_room(hardware: Hardware, store: Store, room: int) -> Hardware:
    """All nodes with so little on their hosts, or on their cards."""

    def smaller(node: Node) -> Node:
        if store.where == "host":
            return replace(node, host_bytes=room)
        cards = (replace(card, usable_bytes=min(card.usable_bytes, room)) for card in node.cards)
        return replace(node, cards=tuple(cards))

    return Hardware(tuple(smaller(node) for node in hardware.nodes))
