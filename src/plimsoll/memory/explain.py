"""The reasons why a run ran out of memory, as a record and as text of 80 columns.

An explanation has predicted and measured bytes, the answers to the four questions to ask when
memory ran out, and the smallest change that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from plimsoll.config.cluster import RankKind
from plimsoll.machine.hardware import Hardware
from plimsoll.machine.incident import Incident, NodeState, Sighting
from plimsoll.machine.nvidia import LiveCard
from plimsoll.memory.advise import Suggestion, change_lines, smallest_change
from plimsoll.memory.contents.contents import PlannedJob, roles_in
from plimsoll.memory.contents.layout import Process, Slot
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import Store, Use, fullest, process_peaks, reading_name
from plimsoll.memory.plan import wrap_lines
from plimsoll.memory.weigh import Ground, weigh
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import gigabytes_text, plural
from plimsoll.run.readings import DividedShare, Footprint, Footprints
from plimsoll.timeline.items import Where
from plimsoll.trainer.price import trainer_price

_UNEVEN = 1.1
"""If a rank holds more than this times an equal share, the partitioning did not take effect."""
_MUCH = 0.05
"""Other processes hold much if they hold more than this share of the capacity."""


@dataclass(frozen=True)
class Finding:
    """The answer to one of the questions."""

    question: str
    """The question as it is printed."""
    verdict: Literal["yes", "no", "unknown"]
    """The answer; `unknown` if nothing was seen."""
    text: str
    """The numbers behind the answer."""


@dataclass(frozen=True)
class Scene:
    """The place where memory ran out, as it was planned and as it was seen."""

    job: PlannedJob
    incident: Incident
    seen: Sighting
    """The observations of the cluster."""
    phase: str
    """The phase of the run."""
    store: Store
    """The plan's card or host that was too small."""
    use: Use
    """The planned items there at the fullest instant of the phase."""
    planned: tuple[Process, ...]
    """The processes that the plan has there."""

    @property
    def measured(self) -> Footprint | None:
        """The bytes of the process when it failed, or when it was last read."""
        last = self.seen.last
        return self.incident.held or (None if last is None else last.held)

    @property
    def predicted(self) -> Footprints:
        """The planned bytes of the process by phase."""
        return process_peaks(self.job).get(self.seen.process, {})


def answer_questions(scene: Scene) -> tuple[Finding, Finding, Finding, Finding]:
    """Return the answers to the four questions, in the order in which to ask them."""
    return (
        _ask_free_memory(scene),
        _ask_partitioning(scene),
        _ask_models(scene),
        _ask_other_processes(scene),
    )


def room_of(scene: Scene) -> int | None:
    """Return the bytes that the run could use on the card or host; None if unknown.

    They are the bytes when the run began, or else now, without those that other processes hold.
    """
    state = scene.seen.before or scene.seen.after
    if state is None:
        return None
    if scene.store.where == "host":
        return state.room
    card = _card(scene.seen, state)
    return None if card is None else card.usable_bytes - _held_by_others(card, state)


def _ask_free_memory(scene: Scene) -> Finding:
    question = f"Is the {scene.store.place}'s free memory below the plan's?"
    need, capacity, room = scene.store.peak.bytes, scene.store.capacity, room_of(scene)
    wanted = f"the plan needs {gigabytes_text(need)} at its fullest"
    if capacity is not None:
        wanted += f", of {gigabytes_text(capacity)}"
    if room is None:
        return Finding(question, "unknown", f"the {scene.store.place} was not seen; {wanted}")
    when = "when the run began" if scene.seen.before else "now"
    text = f"{gigabytes_text(room)} could be had {when}; {wanted}"
    return Finding(question, "yes" if room < need else "no", text)


def _ask_partitioning(scene: Scene) -> Finding:
    question = "Did the partitioning take effect?"
    wanted = _roles_to_divide(scene.job)
    if not wanted:
        return Finding(question, "no", f"none was asked for: {_divisions_text(scene.job)}")
    shares = [(name, share) for name, share in _shares(scene) if share.role in wanted]
    if not shares:
        text = f"no rank has reported yet what it holds of the {' and '.join(wanted)}"
        return Finding(question, "unknown", text)
    largest = {share.role: (name, share) for name, share in sorted(shares, key=_excess_of_share)}
    uneven = any(_excess_of_share(named) > _UNEVEN for named in largest.values())
    text = "; ".join(_share_text(name, share) for name, share in largest.values())
    return Finding(question, "no" if uneven else "yes", text)


def _shares(scene: Scene) -> Iterator[tuple[str, DividedShare]]:
    """Yield the shares of roles, each with the process that holds it."""
    yield from ((scene.seen.process, share) for share in scene.incident.shares)
    for name, reading in scene.seen.readings.items():
        yield from ((name, share) for share in reading.shares)


def _excess_of_share(named: tuple[str, DividedShare]) -> float:
    _, share = named
    return share.held * share.ranks / share.whole


def _share_text(name: str, share: DividedShare) -> str:
    part = share.whole // share.ranks
    return (
        f"{name} holds {gigabytes_text(share.held)} of the {share.role}'s {share.what}, no rank "
        f"more; P/N is {gigabytes_text(share.whole)} / {share.ranks} = {gigabytes_text(part)}"
    )


def _roles_to_divide(job: PlannedJob) -> list[str]:
    several = [job.spec.roles[name] for name in job.shapes if job.spec.ranks_of(name) > 1]
    return [r.name for r in several if trainer_price(r.settings).is_divided(r.settings)]


def _divisions_text(job: PlannedJob) -> str:
    groups: dict[RankKind, list[str]] = {}
    for name in job.shapes:
        role = job.spec.roles[name].settings
        division = f"{name} at {trainer_price(role).division(role)}"
        groups.setdefault(job.spec.rank_kind_of(name), []).append(division)
    counts = job.spec.cluster.rank_counts
    parts = (f"{', '.join(group)}, on {plural(counts[k], 'rank')}" for k, group in groups.items())
    return "; ".join(parts)


def _ask_models(scene: Scene) -> Finding:
    question = f"Did two models land on one {scene.store.place}?"
    planned, present = models_of(scene.job, scene.planned), models_of(scene.job, _here(scene))
    text = ", ".join(_model_text(scene.use, role) for role in present) or "none is there"
    stray = [role for role in present if role not in planned]
    if stray:
        text += f"; the plan has the {' and '.join(stray)} elsewhere"
    return Finding(question, "yes" if len(present) > 1 else "no", text)


def _here(scene: Scene) -> Sequence[Process]:
    """Return the processes that are really on the node; for a card, the planned ones."""
    nodes = scene.seen.nodes
    if scene.store.where == "device" or not nodes:
        return scene.planned
    everyone = scene.job.layout.processes
    return [process for process in everyone if nodes.get(reading_name(process)) == scene.seen.node]


def models_of(job: PlannedJob, processes: Sequence[Process]) -> list[str]:
    """Return the roles in these processes, with "rollout" for an engine."""
    roles: dict[str, None] = {}
    for process in processes:
        roles |= dict.fromkeys(roles_in(job, process))
        if job.sampler is not None and process.samples:
            roles["rollout"] = None
    return list(roles)


def _model_text(use: Use, role: str) -> str:
    size = sum(item.bytes for item in use.items if item.role == role)
    return f"{role} ({gigabytes_text(size)} planned)" if size else role


def _ask_other_processes(scene: Scene) -> Finding:
    question = "Do other processes hold much?"
    states = [state for state in (scene.seen.after, scene.seen.before) if state is not None]
    if scene.store.where == "host" and states:
        state = states[0]
        held = state.capacity - state.room
        inside = (h for h in state.others if h.bytes <= held)  # not in another cgroup
        named = [f"{h.name} (pid {h.pid}) {gigabytes_text(h.bytes)}" for h in inside]
        return _others_finding(question, held, state.capacity, named)
    for state in states:
        card = _card(scene.seen, state)
        # If the driver hides processes, those of the run would count as others.
        if card is not None and (card.processes or state is scene.seen.before):
            others = [p for p in card.processes if p.pid not in state.pids]
            sizes = ["?" if p.bytes is None else gigabytes_text(p.bytes) for p in others]
            named = [f"{p.name} (pid {p.pid}) {s}" for p, s in zip(others, sizes, strict=True)]
            held = _held_by_others(card, state)
            return _others_finding(question, held, card.usable_bytes, named)
    return Finding(question, "unknown", f"the {scene.store.place} was not seen")


def _others_finding(question: str, held: int, capacity: int, named: Sequence[str]) -> Finding:
    text = f"{gigabytes_text(held)} in all"
    if named:
        text += f"; most: {', '.join(named)}"
    return Finding(question, "yes" if held > _MUCH * capacity else "no", text)


def _card(seen: Sighting, state: NodeState) -> LiveCard | None:
    """Return the card of the process; None if it was not seen or the driver reports no bytes."""
    cards = (card for card in state.cards if card.index == seen.card)
    return next((card for card in cards if card.total_bytes), None)


def _held_by_others(card: LiveCard, state: NodeState) -> int:
    of_run = sum(process.bytes or 0 for process in card.processes if process.pid in state.pids)
    return max(0, card.used_bytes - of_run)


_SHOWN = 6
_SAME = {"eval": ("rollout", "score")}
"""Phases that the plan has under another name."""


@dataclass(frozen=True)
class Explanation:
    """The reasons why a process ran out of memory, and a change that would have fitted."""

    scene: Scene
    findings: tuple[Finding, Finding, Finding, Finding]
    """The answers to the four questions."""
    room: int
    """The largest planned peak, in bytes, with which the run would have fitted."""
    change: Suggestion | None
    """The smallest change that fits in this room; None if nothing was found."""

    @property
    def should_have_fitted(self) -> bool:
        """Whether the plan's peak was available, and the process held no more than planned."""
        return self.findings[0].verdict == "no" and self.room == self.scene.store.peak.bytes


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
    room = room_needed(scene)
    change = smallest_change(spec, Ground(_with_room(hardware, scene.store, room), constants))
    return Explanation(scene, answer_questions(scene), room, change)


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
    names = _SAME.get(phase, (phase,))
    # The fullest instant of the phase; of all phases if the plan does not have it.
    use = fullest([use for use in store.phases if use.moment.phase in names] or store.phases)
    return Scene(job, incident, incident.seen, phase, store, use, planned)


def role_of(scene: Scene) -> str:
    """Return the role that ran out of memory, or all possible roles joined by "or"."""
    phase = scene.phase
    known = scene.incident.role or (phase if phase == "rollout" else None)
    for role in scene.job.spec.roles.values():
        if phase == role.trains or (role.early and phase == role.scoring_phase):
            known = known or role.name
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

    most, measured = max(map(size, scene.predicted.values()), default=0), scene.measured
    return max(1.0, size(measured) / most) if measured and most else 1.0


def _on(slot: Slot, where: Where) -> Slot:
    """Return the slot itself for a device, or its node's slot for a host."""
    return slot if where == "device" else Slot(slot.node)


def _processes(job: PlannedJob, name: str) -> list[Process]:
    return [process for process in job.layout.processes if reading_name(process) == name]


def _with_room(hardware: Hardware, store: Store, room: int) -> Hardware:
    """Return the hardware with `room` bytes on each host, or at most `room` on each card."""
    if store.where == "host":
        return replace(hardware, node=replace(hardware.node, host_bytes=room))
    cards = (replace(c, usable_bytes=min(c.usable_bytes, room)) for c in hardware.node.cards)
    return replace(hardware, node=replace(hardware.node, cards=tuple(cards)))


_NAMES = {
    "allocated": "allocated by torch",
    "reserved": "reserved by torch",
    "device": "used on the card by all",
    "host": "host",
}


def explanation_text(explanation: Explanation) -> str:
    """Return the explanation as text of several lines."""
    scene, incident, seen = explanation.scene, explanation.scene.incident, explanation.scene.seen
    where = f"{incident.where} memory of {seen.process}, node {seen.node}"
    lines = [_wrap(f"Where: {where}; phase {scene.phase}, role {role_of(scene)}")]
    if incident.asked is not None:
        lines.append(f"Asked for: {gigabytes_text(incident.asked)} more")
    lines += _measures(scene)
    lines.append(f"The largest items of the {scene.store.place} in this phase, as predicted:")
    for item in scene.use.items[:_SHOWN]:
        lines.append(f"  {gigabytes_text(item.bytes):>8}  {item.role} {item.name}")
    for number, finding in enumerate(explanation.findings, 1):
        lines.append(f"{number}. {finding.question} {finding.verdict}:")
        lines.append(wrap_lines(f"   {finding.text}", "   "))
    return "\n".join([*lines, *_change(explanation)])


def _measures(scene: Scene) -> Iterator[str]:
    """Yield the measured and the predicted bytes of the process."""
    when = "when it failed" if scene.incident.held else "when it was last read"
    if scene.measured is None:
        yield "Measured: nothing, because it failed before it was first read"
    else:
        yield _wrap(f"Measured {when}: {_footprint(scene.measured)}")
    if predicted := scene.predicted.get(scene.phase):
        yield _wrap(f"Predicted for the phase: {_footprint(predicted)}")
    else:
        yield f"Predicted: nothing, because the plan has no phase {scene.phase}"


def _footprint(footprint: Footprint) -> str:
    sizes = ((words, getattr(footprint, name)) for name, words in _NAMES.items())
    return ", ".join(f"{gigabytes_text(s)} {words}" for words, s in sizes if s is not None)


def _change(explanation: Explanation) -> Iterator[str]:
    if explanation.should_have_fitted:
        yield _wrap(
            "By these numbers it should have fitted: look for a limit on the process (ulimit -v, a "
            "cgroup), or for a peak that the plan does not have."
        )
    room, change = gigabytes_text(explanation.room), explanation.change
    place = explanation.scene.store.place
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
