"""The four questions to ask when memory ran out, in order, and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from plimsoll.config.cluster import RankKind
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.machine.incident import Incident, NodeState, Sighting
from plimsoll.machine.nvidia import CardProcess, LiveCard
from plimsoll.memory.contents.contents import PlannedJob, roles_in
from plimsoll.memory.contents.layout import Process
from plimsoll.memory.contents.process_peaks import reading_name
from plimsoll.memory.contents.stores import Store, Use
from plimsoll.run.numbers import gigabytes_text, plural
from plimsoll.run.readings import DividedShare
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
    store: Store
    """The plan's card or host that was too small."""
    use: Use
    """The planned items there at the fullest instant of the phase."""
    planned: tuple[Process, ...]
    """The processes that the plan has there."""


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
        text = f"no rank has reported yet what it holds of the {_and(wanted)}"
        return Finding(question, "unknown", text)
    largest = {share.role: (name, share) for name, share in sorted(shares, key=_excess)}
    uneven = any(_excess(named) > _UNEVEN for named in largest.values())
    text = "; ".join(_share_text(name, share) for name, share in largest.values())
    return Finding(question, "no" if uneven else "yes", text)


def _shares(scene: Scene) -> Iterator[tuple[str, DividedShare]]:
    """Yield the shares of roles, each with the process that holds it."""
    yield from ((scene.seen.process, share) for share in scene.incident.shares)
    for name, reading in scene.seen.readings.items():
        yield from ((name, share) for share in reading.shares)


def _excess(named: tuple[str, DividedShare]) -> float:
    _, share = named
    return share.held * share.ranks / share.whole


def _share_text(name: str, share: DividedShare) -> str:
    part = share.whole // share.ranks
    return (
        f"{name} holds {gigabytes_text(share.held)} of the {share.role}'s {share.what}, no rank "
        f"more; P/N is {gigabytes_text(share.whole)} / {share.ranks} = {gigabytes_text(part)}"
    )


def _roles_to_divide(job: PlannedJob) -> list[str]:
    roles: dict[str, TrainedRole | FrozenRole] = {**job.spec.trained, **job.spec.frozen}
    divided = [name for name, role in roles.items() if trainer_price(role).is_divided(role)]
    return [name for name in job.shapes if name in divided and job.spec.ranks_of(name) > 1]


def _divisions_text(job: PlannedJob) -> str:
    roles: dict[str, TrainedRole | FrozenRole] = {**job.spec.trained, **job.spec.frozen}
    groups: dict[RankKind, list[str]] = {}
    for name, role in roles.items():
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
        text += f"; the plan has the {_and(stray)} elsewhere"
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
            named = [f"{p.name} (pid {p.pid}) {_size(p)}" for p in others]
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


def _size(process: CardProcess) -> str:
    return "?" if process.bytes is None else gigabytes_text(process.bytes)


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
