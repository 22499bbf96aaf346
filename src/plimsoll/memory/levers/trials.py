"""Trials: configs with changes, each planned once, and which levers may help them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plimsoll.memory.contents.stores import VERDICTS, Band, Store, Use, likely_worst
from plimsoll.memory.levers.changes import Change, apply_changes, changes_between
from plimsoll.memory.rules.ranks import idle_ranks
from plimsoll.memory.weigh import Ground, Plan, weigh
from plimsoll.resolve.roles import is_role
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.timeline.items import Item, Kind, Where
from plimsoll.timeline.levers import Lever, Move, Room, Situation

_ERROR = 1000.0
"""The weight of an error in `Trial.lacking`, larger than that of any lack of memory."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A config with some changes, and its plan."""

    changes: frozenset[Change]
    plan: Plan

    @property
    def spec(self) -> RunSpec[Any]:
        """The run with the changes."""
        return self.plan.job.spec

    @property
    def rank(self) -> int:
        """The position of the verdict among all verdicts; 0 is `fits`."""
        return VERDICTS.index(self.plan.verdict)

    @cached_property
    def lacking(self) -> float:
        """The amount that is lacking, as a number to compare trials by; 0 if nothing is.

        For each phase of each store it adds the bytes above the capacity divided by the capacity.
        A process without a card adds 1. An error counts more than everything else.
        """
        errors = sum(problem.severity == "error" for problem in self.plan.problems)
        over = sum(share for _, _, share in self._overfull)
        return _ERROR * errors + len(self.plan.job.layout.unplaced) + over

    @cached_property
    def _overfull(self) -> Sequence[tuple[Store, Use, float]]:
        """The stores in the phases that may exceed their capacity, and by which share of it."""
        return [
            (store, use, share)
            for store in self.plan.stores
            if store.capacity is not None
            for use in store.phases
            if (share := likely_worst(use, self.plan.band) / store.capacity - 1) > 0
        ]

    def is_helped_by(self, lever: Lever) -> bool:
        """Return whether a lever may help.

        It helps with an error, or with items of a phase in which a card or host is too full.
        """
        if lever.codes & {problem.code for problem in self.plan.problems}:
            return True
        return any(
            relief.covers(kind, where, phase)
            for where, phase, kind in self._too_much
            for relief in lever.reliefs
        )

    @cached_property
    def _too_much(self) -> frozenset[tuple[Where, Phase, Kind]]:
        """The place, phase and kind of each item on a card or host that is too full."""
        return frozenset(
            (store.where, use.moment.phase, item.kind)
            for store, use, _ in self._overfull
            for item in use.held
            if item.bytes
        )

    @cached_property
    def situation(self) -> Situation:
        """The run on its machines, for levers."""
        job, plan = self.plan.job, self.plan
        ranks = [store for store in plan.devices if _has_ranks(store)]
        caches = [store for store in plan.hosts if any(held.item.cache for held in store.held)]
        beside = [_room(store, plan.band, lambda item: item.role == "rollout") for store in ranks]
        beside += [_room(store, plan.band, lambda item: item.cache) for store in caches]
        return Situation(
            *(job.spec, job.hardware, job.device, job.capability, job.policy),
            rooms=tuple(room for room in beside if room is not None),
        )


def _has_ranks(store: Store) -> bool:
    return any(is_role(held.item.role) for held in store.held)


def _room(store: Store, band: Band, unwanted: Callable[[Item], bool]) -> Room | None:
    """Return a store's capacity and bytes by phase, without the unwanted items.

    None if its capacity is unknown.
    """
    if store.capacity is None:
        return None
    uses = store.without(unwanted).phases
    others = {use.moment.phase: round(likely_worst(use, band)) for use in uses}
    return Room(store.where, store.capacity, others)


@dataclass(frozen=True)
class Trials:
    """The trials of one config on its machines."""

    spec: RunSpec[Any]
    """The config as written."""
    ground: Ground
    """The machines, all of one kind."""
    known: dict[frozenset[Change], Trial | None] = field(default_factory=dict)
    """The trials so far."""

    @property
    def root(self) -> Trial:
        """The trial of the config as written."""
        root = self.of({})
        assert root is not None, "a config whose settings contradict one another"
        return root

    def of(self, move: Move) -> Trial | None:
        """Return the trial of a move; None if the move is not possible.

        That is so if settings then conflict, or if ranks become idle that are not idle in the
        config as written.
        """
        changes = frozenset(changes_between(self.spec, move))
        if changes not in self.known:
            self.known[changes] = self._make_trial(changes)
        return self.known[changes]

    def _make_trial(self, changes: frozenset[Change]) -> Trial | None:
        ordered = sorted(changes, key=lambda change: change.key)
        spec = apply_changes(self.spec, ordered) if changes else self.spec
        if spec is None:
            return None
        trial = Trial(changes, weigh(spec, self.ground.under(spec)))
        idles = changes and _has_idle_ranks(trial) and not _has_idle_ranks(self.root)
        return None if idles else trial


def _has_idle_ranks(trial: Trial) -> bool:
    return any(idle_ranks(trial.plan.job))
