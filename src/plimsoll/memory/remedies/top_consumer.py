"""Which item breaks a plan: what would have to go for the rest to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plimsoll.memory.contents.stores import Store
from plimsoll.memory.remedies.changes import Remedy
from plimsoll.memory.remedies.remedies import remedies_for, remedies_for_states
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.items import Item, Kind


@dataclass(frozen=True)
class TopConsumer:
    """Items of a peak that could go together, the largest first.

    what: in words. kind: None for all that a role has. alone: without them the rest fits.
    remedies: what to do about them, one or another.
    """

    what: str
    kind: Kind | None
    items: tuple[Item, ...]
    alone: bool
    remedies: tuple[Remedy, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


_OPTIONAL: tuple[Kind | None, ...] = (
    "frozen models",
    "activations",
    "rollout engines",
    "optimizer states",
    "gradients",
    "buffers",
    "weights",
    "processes",
    None,
)
"""What can be done without, before what can hardly."""

Choice = Callable[[Item], bool]


def find_top_consumer(store: Store, spec: RunSpec[Any]) -> TopConsumer:
    """Of an overfull store: of what would make it fit by going alone, the most optional kind, and
    of that the largest; where nothing would, the largest of all."""
    kinds = sorted(_kinds(store, spec), key=lambda one: -one.bytes)
    alone = [one for one in [*kinds, *_roles(store, spec)] if one.alone]
    return min(alone, key=lambda one: _OPTIONAL.index(one.kind)) if alone else kinds[0]


def _kinds(store: Store, spec: RunSpec[Any]) -> Iterator[TopConsumer]:
    """Each role's items of one kind."""
    for role, kind in dict.fromkeys((item.role, item.kind) for item in store.peak.items):

        def chosen(item: Item, role: str = role, kind: Kind = kind) -> bool:
            return item.role == role and item.kind == kind

        phase = store.peak.moment.phase
        remedies = remedies_for(role, kind, store.where, phase, spec)
        yield _consumer(store, _words(role, kind), kind, chosen, remedies)


def _roles(store: Store, spec: RunSpec[Any]) -> Iterator[TopConsumer]:
    """All that a trained role has, for which it would need other machines: the critic first."""
    for role in ("critic", "actor") if "critic" in spec.trained else ():

        def chosen(item: Item, role: str = role) -> bool:
            return item.role == role

        remedies = remedies_for_states(role, store.where, spec)
        yield _consumer(store, f"all of the {role}", None, chosen, remedies)


def _consumer(
    store: Store, what: str, kind: Kind | None, chosen: Choice, remedies: Iterable[Remedy]
) -> TopConsumer:
    assert store.capacity is not None
    alone = store.without(chosen).peak.bytes <= store.capacity
    items = tuple(item for item in store.peak.items if chosen(item))
    return TopConsumer(what, kind, items, alone, tuple(remedies))


def _words(role: str, kind: Kind) -> str:
    match kind:
        case "frozen models":
            return f"the {role} model"
        case "rollout engines" | "processes":
            return f"the {kind}"
        case _:
            return f"the {role}'s {kind}"
