"""Memory levers: settings by which a run needs less memory, or needs it elsewhere.

The levers of an engine are in the `levers.py` of its folder, other levers in memory/levers/.
memory/levers/levers.py lists all of them. Refusals, `plimsoll plan --suggest`, the report of a
run out of memory and the page of a plan read that list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from plimsoll.config.base import Settings
from plimsoll.config.cluster import Device
from plimsoll.config.engine import TrainedRole
from plimsoll.config.engines import HasEngine
from plimsoll.config.problems import Code
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.hardware import Hardware
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Kind, Where

LeverValue = bool | int | float | str | None
Move = Mapping[str, LeverValue]
"""Dotted keys and their new values."""

Effect = Literal["same", "rounding", "adapters", "machines", "shorter"]
"""The effect of a lever on the result of training.

- same: no effect.
- rounding: the same training with coarser numbers.
- adapters: only adapters learn.
- machines: no effect, but the run takes more machines.
- shorter: less of each sequence is learned.
"""
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""All effects, from the most welcome to the least."""

Scope = Literal["run", "trained", "frozen"]
"""The keys that a lever changes: the run's, or those of each role that learns or only scores."""


@dataclass(frozen=True)
class Relief:
    """The kinds of memory items that a lever shrinks or moves, and where that leaves room."""

    kinds: tuple[Kind, ...]
    """The kinds of these items."""
    where: tuple[Where, ...] = ("device", "host")
    """The places that have more room afterwards."""
    phases: tuple[Phase, ...] | None = None
    """The phases with more room; None: all phases."""

    def covers(self, kind: Kind | None, where: Where, phase: Phase) -> bool:
        """Return whether items of a kind (None: any kind) become smaller in a place and phase."""
        has_room = where in self.where and (self.phases is None or phase in self.phases)
        return has_room and (kind is None or kind in self.kinds)


@dataclass(frozen=True)
class Room:
    """A card or a host that engines share with others."""

    where: Where
    capacity: int
    """Usable bytes."""
    others: Mapping[Phase, int]
    """For each phase, the peak bytes of everything but the engine, with the plan's band added.

    On a host these include everything of an engine that is not its KV cache.
    """


@dataclass(frozen=True)
class Situation:
    """A run on its machines, from which a lever computes its moves."""

    spec: RunSpec[Any]
    hardware: Hardware
    device: Device
    capability: tuple[int, int] | None
    """The lowest compute capability of the run's cards; None if unknown."""
    policy: ModelShape
    """The shape of the model that engines sample with."""
    rooms: Sequence[Room]
    """The cards and hosts that engines share with others."""
    role: RoleName = ""
    """The role whose keys are changed; "" for keys of the run."""

    @property
    def trained(self) -> TrainedRole:
        """The settings of the role, which must be one that learns."""
        return self.spec.trained[self.role]

    @property
    def rollout(self) -> RolloutConfig:
        """The settings of the engines; the run must have engines."""
        assert self.spec.engines is not None, "a lever of engines in a run without them"
        return self.spec.engines

    @property
    def cards(self) -> int:
        """The number of cards of all nodes."""
        return self.spec.cluster.nodes * len(self.hardware.node.cards)


def halves(count: int, least: int) -> Sequence[int]:
    """Return half of a count, a quarter and so on, down to the least."""
    smaller = []
    while count > least:
        count = max(count // 2, least)
        smaller.append(count)
    return smaller


def has_cards(spec: RunSpec[Any]) -> bool:
    """Return whether the ranks compute on cards, whose memory a lever can move to the host."""
    return spec.cluster.device != "cpu"


@dataclass(frozen=True)
class Lever:
    """A setting by which a run needs less memory, or needs it elsewhere."""

    keys: tuple[str, ...]
    """The keys that the lever changes, the decisive one first.

    They are in the section of a role if `scope` is not "run".
    """
    words: str
    """The change as a noun phrase, such as "smaller micro-batches"."""
    cost: str
    """The cost of the change, as half a sentence."""
    rank: int
    """The order of cost: levers of lower ranks are turned first."""
    settings: Callable[[Situation], Sequence[Move]]
    """Returns the possible moves, the mildest first; each needs less memory than the one before."""
    reliefs: tuple[Relief, ...]
    """The items that become smaller."""
    effect: Effect = "same"
    """The effect on the result of training."""
    scope: Scope = "run"
    """Whose keys change: the run's, or those of each role that learns or only scores."""
    engine: type[Settings] | None = None
    """The settings class of the engine that has the keys; None: any engine.

    Only runs and roles with that engine are changed.
    """
    applies: Callable[[RunSpec[Any]], bool] = lambda spec: True
    """Returns whether the keys have an effect in a run."""
    codes: frozenset[Code] = frozenset()
    """The errors that the lever may fix, besides the errors of a full card or host."""
    control: bool = False
    """Whether the page of a plan has a field for the lever's decisive key."""

    def roles(self, spec: RunSpec[Any]) -> tuple[RoleName, ...]:
        """Return the roles whose keys the lever changes; for keys of the run, an empty name."""
        sections: Mapping[RoleName, HasEngine | None] = {
            "run": {"": spec.engines},
            "trained": spec.trained,
            "frozen": spec.frozen,
        }[self.scope]
        return tuple(
            name
            for name, section in sections.items()
            if self.applies(spec) and self._is_for(section)
        )

    def _is_for(self, section: HasEngine | None) -> bool:
        """Return whether a section of the config has the lever's engine."""
        settings = None if section is None else section.engine_settings
        return self.engine is None or isinstance(settings, self.engine)
