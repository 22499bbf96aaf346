"""What a memory lever is: a setting by which a run needs less memory, or needs it elsewhere.

A lever is a value. The levers of an engine stand in the `levers.py` of its folder, those of the run
at large in memory/levers/. memory/levers/catalogue.py lists them all, and whoever offers a change
reads that list: refusals, `plimsoll plan --suggest`, the report of a run out of memory, the page of
a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from plimsoll.config.base import Settings
from plimsoll.config.cluster import Device
from plimsoll.config.codes import Code
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.engines import HasEngine
from plimsoll.machine.hardware import Hardware
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import Phase, RunSpec
from plimsoll.timeline.items import Kind, Where

Value = bool | int | float | str | None
Move = Mapping[str, Value]
"""Dotted keys and what they become."""

Effect = Literal["same", "rounding", "adapters", "machines", "shorter"]
"""What becomes of what is learned. same: nothing. rounding: the same training with coarser numbers.
adapters: only adapters learn. machines: nothing, but the run takes more machines. shorter: less of
each sequence is learned from."""
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""From the most welcome to the least."""

Turns = Literal["run", "trained", "frozen"]
"""Whose keys a lever turns: the run's, or those of each role that learns, or that only scores."""


@dataclass(frozen=True)
class Relief:
    """Items that become smaller, or go elsewhere."""

    kinds: frozenset[Kind]
    """The kinds of these items."""
    where: frozenset[Where]
    """The sides that have more room afterwards."""
    phases: frozenset[Phase] | None = None
    """The phases in which they do; None: in all."""

    def covers(self, kind: Kind | None, where: Where, phase: Phase) -> bool:
        """Return whether items of a kind (None: of any) become smaller there in a phase."""
        there = where in self.where and (self.phases is None or phase in self.phases)
        return there and (kind is None or kind in self.kinds)


def relief(
    *kinds: Kind, where: Sequence[Where] = ("device", "host"), phases: Sequence[Phase] | None = None
) -> Relief:
    """Return the relief of items of these kinds."""
    during = None if phases is None else frozenset(phases)
    return Relief(frozenset(kinds), frozenset(where), during)


@dataclass(frozen=True)
class Room:
    """A card or a host that engines share with others."""

    where: Where
    capacity: int
    """Usable bytes."""
    others: Mapping[Phase, int]
    """Bytes of all else at its fullest in each phase, if the plan is as much too low as its band
    says. On a host, whatever of an engine is not its KV cache is among them."""


@dataclass(frozen=True)
class Situation:
    """A run on its machines, as a lever finds it."""

    spec: RunSpec[Any]
    hardware: Hardware
    device: Device
    capability: tuple[int, int] | None
    """The lowest compute capability of its cards; None if unknown."""
    policy: ModelShape
    """The shape of the model that engines sample with."""
    rooms: Sequence[Room]
    """The cards and hosts that engines share with others."""
    role: RoleName = ""
    """The role whose keys are turned; "" for keys of the run."""

    @property
    def trained(self) -> TrainedRole:
        """The settings of the role, which learns."""
        return self.spec.trained[self.role]

    @property
    def frozen(self) -> FrozenRole:
        """The settings of the role, which only scores."""
        return self.spec.frozen[self.role]

    @property
    def cards(self) -> int:
        """The cards of all nodes."""
        return self.spec.cluster.nodes * len(self.hardware.nodes[0].cards)


def halves(count: int, least: int) -> Sequence[int]:
    """Return half of a count, a quarter and so on, down to the least."""
    smaller = []
    while count > least:
        count = max(count // 2, least)
        smaller.append(count)
    return smaller


def _always(spec: RunSpec[Any]) -> bool:
    return True


@dataclass(frozen=True)
class Lever:
    """A setting by which a run needs less memory, or needs it elsewhere."""

    keys: tuple[str, ...]
    """The keys that it turns, the decisive one first; in the section of a role if `turns` is not
    "run"."""
    words: str
    """What turning it does, as the object of a sentence: "smaller micro-batches"."""
    cost: str
    """What it costs, as half a sentence."""
    rank: int
    """The order of cost: levers of lower ranks are turned first."""
    settings: Callable[[Situation], Sequence[Move]]
    """Gives what the keys may become from where they are, the mildest first; each needs less memory
    than the one before."""
    reliefs: tuple[Relief, ...]
    """The items that become smaller."""
    effect: Effect = "same"
    """What becomes of what is learned."""
    turns: Turns = "run"
    """Whose keys it turns."""
    engine: type[Settings] | None = None
    """The settings of the engine that has the keys; None: of any. Only runs and roles with that
    engine are turned."""
    applies: Callable[[RunSpec[Any]], bool] = _always
    """Tells whether the keys mean anything in a run."""
    codes: frozenset[Code] = frozenset()
    """The errors, besides those of a full card or host, that it may mend."""
    control: bool = False
    """Whether the page of a plan has a field for its decisive key."""

    def roles(self, spec: RunSpec[Any]) -> tuple[RoleName, ...]:
        """Return the roles whose keys it turns; one role of no name for keys of the run."""
        if not self.applies(spec):
            return ()
        sections: Mapping[RoleName, HasEngine | None] = {
            "run": {"": spec.engines},
            "trained": spec.trained,
            "frozen": spec.frozen,
        }[self.turns]
        return tuple(name for name, section in sections.items() if self._is_for(section))

    def _is_for(self, section: HasEngine | None) -> bool:
        """Return whether a section of the config has the lever's engine."""
        if self.engine is None:
            return True
        return section is not None and isinstance(section.engine_settings, self.engine)
