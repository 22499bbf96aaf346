"""Which items break a plan: what would have to go for the rest to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plimsoll.memory.contents.stores import Store
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import Phase, RunSpec
from plimsoll.timeline.items import Item, Kind, Where


@dataclass(frozen=True)
class TopConsumer:
    """Items of a peak that could go together, the largest first."""

    role: RoleName
    """Whose they are."""
    kind: Kind | None
    """Their kind; None for all that a role has."""
    where: Where
    """The side that is too small for them."""
    phase: Phase
    """The phase in which it is."""
    items: tuple[Item, ...]
    alone: bool
    """Whether the rest fits without them."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def what(self) -> str:
        """The items in words."""
        match self.kind:
            case None:
                return f"all of the {self.role}"
            case "frozen models":
                return f"the {self.role} model"
            case "rollout engines" | "processes":
                return f"the {self.kind}"
            case _:
                return f"the {self.role}'s {self.kind}"


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


def find_top_consumer(store: Store, spec: RunSpec[Any]) -> TopConsumer:
    """Return the items that break an overfull store: of those that would make it fit by going
    alone, the most optional kind, and of that the largest; if none would, the largest of all."""
    kinds = sorted(_kinds(store), key=lambda consumer: -consumer.bytes)
    alone = [consumer for consumer in [*kinds, *_roles(store, spec)] if consumer.alone]
    return min(alone, key=lambda one: _OPTIONAL.index(one.kind)) if alone else kinds[0]


def _kinds(store: Store) -> Iterator[TopConsumer]:
    """Yield each role's items of one kind."""
    for role, kind in dict.fromkeys((item.role, item.kind) for item in store.peak.items):
        yield _consumer(store, role, kind)


def _roles(store: Store, spec: RunSpec[Any]) -> Iterator[TopConsumer]:
    """Yield all that a trained role has, for which it would need other machines: the critic
    first."""
    for role in ("critic", "actor") if "critic" in spec.trained else ():
        yield _consumer(store, role, None)


def _consumer(store: Store, role: RoleName, kind: Kind | None) -> TopConsumer:
    assert store.capacity is not None

    def is_chosen(item: Item) -> bool:
        return item.role == role and kind in (None, item.kind)

    alone = store.without(is_chosen).peak.bytes <= store.capacity
    items = tuple(item for item in store.peak.items if is_chosen(item))
    return TopConsumer(role, kind, store.where, store.peak.moment.phase, items, alone)
