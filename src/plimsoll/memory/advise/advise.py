"""The changes that would make a config fit, and the cost of each.

One answer is the smallest change: the cheapest levers are turned until the config fits, and those
that are not needed are taken back. The other answers are of other kinds. For them the levers of the
kind are turned first, so that a person may choose an adapter, for example, instead of offload.
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
"""The most answers on the given machines; there is one more on more machines."""
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
        """The effect of all changes together on the result of training."""
        return effect_of(self.levers)

    @property
    def costs(self) -> tuple[str, ...]:
        """The cost of each lever, in words."""
        return tuple(dict.fromkeys(lever.cost for lever in self.levers))

    @property
    def flags(self) -> str:
        """The changes as flags of the command line."""
        return " ".join(change.flag for change in self.changes)


@dataclass(frozen=True)
class Advice:
    """The suggestions that would make a config fit."""

    fits: bool
    """Whether the config fits as it is written, and needs no change."""
    answers: tuple[Suggestion, ...] = ()
    """One suggestion of each kind, the smallest change first.

    A person chooses by number, from 1 on. Suggestions are risky only if nothing fits.
    """


def advise(spec: RunSpec[Any], ground: Ground) -> Advice:
    """Return the suggestions that would make a config fit.

    Args:
        spec: the run.
        ground: the machines, all of one kind.

    Raises ConfigError for a model whose shape cannot be known.
    """
    trials = Trials(spec, ground)
    made = list(_of_each_kind(trials))
    best = [answer for answer in made if answer.verdict == "fits"] or made
    answers = list(_drop_extensions(best))
    here = [answer for answer in answers if answer.effect != "machines"][:_MOST_HERE]
    chosen = [answer for answer in answers if answer in here or answer.effect == "machines"]
    return Advice(trials.root.rank == 0, tuple(chosen))


def smallest_change(spec: RunSpec[Any], ground: Ground) -> Suggestion | None:
    """Return the cheapest suggestion; None if the config fits, or if nothing makes it fit.

    Raises as `advise`.
    """
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


def _drop_extensions(suggestions: Sequence[Suggestion]) -> Iterator[Suggestion]:
    """Yield the suggestions without those that change all keys of a more welcome one."""
    for place, suggestion in enumerate(suggestions):
        keys = {change.key for change in suggestion.changes}
        if not any({c.key for c in before.changes} <= keys for before in suggestions[:place]):
            yield suggestion


def _of_kind(trials: Trials, effect: Effect) -> Suggestion | None:
    """Return the cheapest answer of a kind; None if no answer needs a lever of this kind."""
    allowed = (effect, *_BESIDE[effect])
    levers = [lever for lever in levers_by_rank() if lever.effect in allowed]
    of_kind = [lever for lever in levers if lever.effect == effect and effect != "same"]
    errors = {problem.code for problem in trials.root.plan.problems}
    mending = [lever for lever in levers if lever.codes & errors and lever not in of_kind]
    firsts = [None, *of_kind, *mending]
    kept = [lever if lever in of_kind else None for lever in firsts]
    way = Descent(trials, levers, _at_most(0))
    ends = [_end_of(way, *pair) for pair in zip(firsts, kept, strict=True)]
    better = [(end, lever) for end, lever in zip(ends, kept, strict=True) if end]
    for end, lever in sorted(better, key=lambda pair: (_rank(trials, pair[0]), cost_of(pair[0]))):
        fewest = replace(way, enough=_at_most(_rank(trials, end))).take_back(end, lever)
        if fewest and effect_of(fewest) == effect:
            return _suggestion(trials, fewest)
    return None


def _at_most(rank: int) -> Callable[[Trial], bool]:
    return lambda trial: trial.rank <= rank


def _end_of(way: Descent, first: Lever | None, kept: Lever | None) -> Turned:
    """Return the needed levers at the end of a descent; none if the config fits no better there."""
    turned = way.descend(first)
    rank = _rank(way.trials, turned)
    if rank >= way.trials.root.rank:
        return {}
    return replace(way, enough=_at_most(rank)).keep_needed(turned, kept)


def _rank(trials: Trials, turned: Turned) -> int:
    return _trial_of(trials, turned).rank


def _trial_of(trials: Trials, turned: Turned) -> Trial:
    trial = trials.of(move_of(turned))
    assert trial is not None, "settings on the way down do not contradict one another"
    return trial


def _suggestion(trials: Trials, turned: Turned) -> Suggestion:
    plan = _trial_of(trials, turned).plan
    return Suggestion(
        changes=changes_between(trials.spec, dict(sorted(move_of(turned).items()))),
        levers=tuple(sorted(turned, key=lambda lever: lever.rank)),
        verdict=plan.verdict,
        device_bytes=max((store.peak.bytes for store in plan.devices), default=0),
        host_bytes=max(store.peak.bytes for store in plan.hosts),
    )
