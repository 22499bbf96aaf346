"""Changes to a config, and trials: configs with changes, each planned once.

Changes are shown as a diff or as flags. A trial says which levers may help its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from plimsoll.config.base import Settings
from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.memory.contents.stores import VERDICTS, Band, Store, Use, likely_worst
from plimsoll.memory.rules import idle_ranks
from plimsoll.memory.weigh import Ground, Plan, weigh
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import Phase, RunSpec, resolve
from plimsoll.timeline.items import Item, Kind, Where
from plimsoll.timeline.levers import Lever, LeverValue, Move, Room, Situation


@dataclass(frozen=True)
class Change:
    """A new value for a key of the config."""

    key: str
    before: LeverValue
    """The value without the change; None if the key's section is not there."""
    after: LeverValue

    @property
    def flag(self) -> str:
        """The change as a flag of the command line."""
        return f"--{self.key} {show(self.after)}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The change as a diff."""
        gone = () if self.before is None else (f"- {self.key}: {show(self.before)}",)
        return (*gone, f"+ {self.key}: {show(self.after)}")


def changes_between(spec: RunSpec[Any], values: Mapping[str, LeverValue]) -> tuple[Change, ...]:
    """Return the changes that set keys to these values, without keys that have them already."""
    made = (Change(key, value_at(spec.config, key), after) for key, after in values.items())
    return tuple(change for change in made if change.before != change.after)


def flags_of(changes: Iterable[Change]) -> list[Flag]:
    """Return a flag for each change, to apply to values or to the text of a config."""
    return [Flag(tuple(change.key.split(".")), change.after) for change in changes]


def apply_changes(spec: RunSpec[Any], changes: Iterable[Change]) -> RunSpec[Any] | None:
    """Return the run after changes to its written config; None if settings then conflict.

    Sections without a change are not checked again.
    """
    flags = flags_of(changes)
    sections = spec.written.model_dump(include={flag.path[0] for flag in flags})
    try:
        tree = apply_flags(Tree({**dict(spec.written), **sections}, {}), flags)
        made = resolve(spec.job, spec.job.config.model_validate(tree.values))
        check_agreement(made)
    except (ValidationError, ConfigError, SettingsConflict):
        return None
    return made


def split_key(spec: RunSpec[Any], key: str) -> tuple[Role | None, str]:
    """Split a key into the role whose section it is in, or None, and the rest of the key."""
    for role in spec.roles.values():
        if key.startswith(f"{role.key}."):
            return role, key.removeprefix(f"{role.key}.")
    return None, key


def value_at(settings: Settings, key: str) -> LeverValue:
    """Return the value of a dotted key of settings; None if one of its sections is missing."""
    value: object = settings
    for name in key.split("."):
        if value is not None:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    assert value is None or isinstance(value, bool | int | float | str), key
    return value


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
        roles = job.spec.roles
        ranks = [s for s in plan.devices if any(held.item.role in roles for held in s.held)]
        caches = [store for store in plan.hosts if any(held.item.cache for held in store.held)]
        beside = [_room(store, plan.band, lambda item: item.role == "rollout") for store in ranks]
        beside += [_room(store, plan.band, lambda item: item.cache) for store in caches]
        return Situation(
            *(job.spec, job.hardware, job.device, job.capability, job.policy),
            rooms=tuple(room for room in beside if room is not None),
        )


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
