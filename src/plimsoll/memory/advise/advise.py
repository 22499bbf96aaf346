"""Which changes to a config would make it fit, and what each costs.

One answer is the smallest change: the levers that cost least, turned until the config fits, without
whatever it does as well without. The others are of other kinds: there a kind's own levers are
turned first, so that a person may choose an adapter, say, instead of offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.memory.contents.stores import Verdict
from plimsoll.memory.levers.catalogue import levers_by_rank
from plimsoll.memory.levers.changes import Change, changes_between
from plimsoll.memory.levers.descent import Descent, Turned, cost_of, effect_of, move_of
from plimsoll.memory.levers.trials import Trial, Trials
from plimsoll.memory.weigh import Ground
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.levers import EFFECTS, Effect, Lever

_MOST_HERE = 3
"""Answers on the machines given; one on more machines comes beside them."""
_BESIDE: Mapping[Effect, tuple[Effect, ...]] = {
    "same": (),
    "rounding": ("same",),
    "adapters": ("same", "rounding"),
    "machines": ("same",),
    "shorter": (),
}
"""The effects that an answer of a kind may have besides its own."""


@dataclass(frozen=True)
class Suggestion:
    """Changes that make a config fit."""

    changes: tuple[Change, ...]
    """The changes, by key."""
    levers: tuple[Lever, ...]
    """The levers that make them, the cheapest first."""
    verdict: Verdict
    device_bytes: int
    """Peak of the fullest card; 0 without cards."""
    host_bytes: int
    """Peak of the fullest host."""

    @property
    def effect(self) -> Effect:
        """What becomes of what is learned, by all changes together."""
        return effect_of(self.levers)

    @property
    def costs(self) -> tuple[str, ...]:
        """What each lever costs, in words."""
        return tuple(dict.fromkeys(lever.cost for lever in self.levers))

    @property
    def flags(self) -> str:
        """The changes as they are typed behind the config on a command line."""
        return " ".join(change.flag for change in self.changes)


@dataclass(frozen=True)
class Advice:
    """What would make a config fit."""

    fits: bool
    """Whether it fits as it is written, and needs nothing."""
    answers: tuple[Suggestion, ...] = ()
    """One of each kind, the smallest change first; a person chooses one by its number, from 1 on.
    They are risky only if nothing fits."""


def advise(spec: RunSpec[Any], ground: Ground) -> Advice:
    """Return what would make a config fit.

    Args:
        ground: machines that are alike.

    Raises ConfigError for a model whose shape cannot be known.
    """
    trials = Trials(spec, ground)
    made = list(_of_each_kind(trials))
    best = [one for one in made if one.verdict == "fits"] or made
    answers = list(_needed_beside(best))
    here = [one for one in answers if one.effect != "machines"][:_MOST_HERE]
    chosen = [one for one in answers if one in here or one.effect == "machines"]
    return Advice(trials.root.rank == 0, tuple(chosen))


def smallest_change(spec: RunSpec[Any], ground: Ground) -> Suggestion | None:
    """Return the suggestion that costs least; None if the config fits, or if nothing would make it
    fit. Raises as `advise`."""
    risky = None
    for suggestion in _of_each_kind(Trials(spec, ground)):
        if suggestion.verdict == "fits":
            return suggestion
        risky = risky or suggestion
    return risky


def _of_each_kind(trials: Trials) -> Iterator[Suggestion]:
    """Yield the cheapest answer of each kind, the most welcome first; none if the config fits."""
    for effect in EFFECTS if trials.root.rank else ():
        suggestion = _of_kind(trials, effect)
        if suggestion is not None:
            yield suggestion


def _needed_beside(suggestions: Sequence[Suggestion]) -> Iterator[Suggestion]:
    """Yield all but those that change whatever a more welcome one changes, and more."""
    for place, one in enumerate(suggestions):
        keys = {change.key for change in one.changes}
        if not any({c.key for c in before.changes} <= keys for before in suggestions[:place]):
            yield one


def _of_kind(trials: Trials, effect: Effect) -> Suggestion | None:
    """Return the cheapest answer of a kind; None if there is none that needs a lever of it."""
    levers = [one for one in levers_by_rank() if one.effect in (effect, *_BESIDE[effect])]
    own = [lever for lever in levers if lever.effect == effect and effect != "same"]
    errors = {problem.code for problem in trials.root.plan.problems}
    mending = [lever for lever in levers if lever.codes & errors and lever not in own]
    firsts = [None, *own, *mending]
    kept = [lever if lever in own else None for lever in firsts]
    way = Descent(trials, levers, _at_most(0))
    ends = [_end_of(way, *pair) for pair in zip(firsts, kept, strict=True)]
    found = [(end, lever) for end, lever in zip(ends, kept, strict=True) if end]
    for end, lever in sorted(found, key=lambda one: (_rank(trials, one[0]), cost_of(one[0]))):
        fewest = replace(way, enough=_at_most(_rank(trials, end))).take_back(end, lever)
        if fewest and effect_of(fewest) == effect:
            return _suggestion(trials, fewest)
    return None


def _at_most(rank: int) -> Callable[[Trial], bool]:
    return lambda trial: trial.rank <= rank


def _end_of(way: Descent, first: Lever | None, kept: Lever | None) -> Turned:
    """Return the levers that are needed where a way down ends; none if it fits no better there than
    as it is written."""
    turned = way.down(first)
    rank = _rank(way.trials, turned)
    if rank >= way.trials.root.rank:
        return {}
    return replace(way, enough=_at_most(rank)).needed(turned, kept)


def _rank(trials: Trials, turned: Turned) -> int:
    return _made(trials, turned).rank


def _made(trials: Trials, turned: Turned) -> Trial:
    trial = trials.of(move_of(turned))
    assert trial is not None, "settings on the way down do not contradict one another"
    return trial


def _suggestion(trials: Trials, turned: Turned) -> Suggestion:
    plan = _made(trials, turned).plan
    return Suggestion(
        changes=changes_between(trials.spec, dict(sorted(move_of(turned).items()))),
        levers=tuple(sorted(turned, key=lambda lever: lever.rank)),
        verdict=plan.verdict,
        device_bytes=max((store.peak.bytes for store in plan.devices), default=0),
        host_bytes=max(store.peak.bytes for store in plan.hosts),
    )
