"""The items that break a plan: without them the rest would fit."""

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
    """The owner of the items."""
    kind: Kind | None
    """Their kind; None for all that a role has."""
    where: Where
    """The side that is too small for them."""
    phase: Phase
    """The phase of the peak."""
    items: tuple[Item, ...]
    alone: bool
    """Whether the rest fits without them."""

    @property
    def bytes(self) -> int:
        """The bytes of all these items."""
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
"""The kinds, the most optional first; None for everything of a role."""


def find_top_consumer(store: Store, spec: RunSpec[Any]) -> TopConsumer:
    """Return the items that break an overfull store.

    Among the kinds without which the rest fits, this is the most optional, and the largest of that
    kind. If there is no such kind, it is the largest of all.
    """
    kinds = sorted(_kinds(store), key=lambda consumer: -consumer.bytes)
    alone = [consumer for consumer in [*kinds, *_roles(store, spec)] if consumer.alone]
    return min(alone, key=lambda top: _OPTIONAL.index(top.kind)) if alone else kinds[0]


def _kinds(store: Store) -> Iterator[TopConsumer]:
    """Yield each role's items of one kind."""
    for role, kind in dict.fromkeys((item.role, item.kind) for item in store.peak.items):
        yield _consumer(store, role, kind)


def _roles(store: Store, spec: RunSpec[Any]) -> Iterator[TopConsumer]:
    """Yield everything of the critic, then of the actor, which could go to other machines."""
    for role in ("critic", "actor") if "critic" in spec.trained else ():
        yield _consumer(store, role, None)


def _consumer(store: Store, role: RoleName, kind: Kind | None) -> TopConsumer:
    assert store.capacity is not None

    def is_chosen(item: Item) -> bool:
        return item.role == role and kind in (None, item.kind)

    alone = store.without(is_chosen).peak.bytes <= store.capacity
    items = tuple(item for item in store.peak.items if is_chosen(item))
    return TopConsumer(role, kind, store.where, store.peak.moment.phase, items, alone)
