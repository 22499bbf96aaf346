"""A suggestion: changes to a config, with what its plan says and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.memory.advise.costs import costs_of
from plimsoll.memory.advise.effects import Effect
from plimsoll.memory.advise.states import State, in_order
from plimsoll.memory.contents.stores import Verdict
from plimsoll.memory.remedies.changes import Change


@dataclass(frozen=True)
class Suggestion:
    """Changes that make a config fit, or one that fits faster.

    effect: on what is learned. device_bytes, host_bytes: of the fullest card (0 without cards) and
    host at its peak. relative_seconds: of a step, over those of the config as written: estimated,
    for ranking. costs: in words. smallest: no other one asks for less.
    """

    changes: tuple[Change, ...]
    effect: Effect
    verdict: Verdict
    device_bytes: int
    host_bytes: int
    relative_seconds: float
    costs: tuple[str, ...]
    smallest: bool = False

    @property
    def flags(self) -> str:
        """To put behind the config on a command line."""
        return " ".join(change.flag for change in self.changes)


def suggestion_of(root: State, state: State, *more: Change) -> Suggestion:
    """What to change of the root to come to a state. more: changes beside those of the state, which
    it was made with."""
    relative = state.seconds / root.seconds
    changes = in_order({*state.changes, *more})
    return Suggestion(
        changes,
        state.effect,
        state.plan.verdict,
        max((store.peak.bytes for store in state.plan.devices), default=0),
        max(store.peak.bytes for store in state.plan.hosts),
        relative,
        costs_of(state.spec, changes, relative),
    )
