"""The descent to a config that fits: turn the cheapest lever that helps, again and again until it
does, and then take back whatever it does as well without."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.memory.levers.catalogue import moves_of
from plimsoll.memory.levers.trials import Trial, Trials
from plimsoll.timeline.levers import EFFECTS, Effect, Lever, Move, Value

Turned = Mapping[Lever, Move]
"""The levers that are turned, and what each of them writes."""
_FEW = 8
"""Moves of a lever that are all tried, one after another."""


def move_of(turned: Turned) -> Move:
    """Return all that the levers write; where two write the same key, the later one holds."""
    written: dict[str, Value] = {}
    for move in turned.values():
        written |= move
    return written


def cost_of(levers: Collection[Lever]) -> tuple[int, int, int]:
    """Return how much the levers cost, to compare by: the rank of the dearest, how many they are,
    and all their ranks."""
    ranks = [lever.rank for lever in levers]
    return max(ranks), len(ranks), sum(ranks)


def effect_of(levers: Iterable[Lever]) -> Effect:
    """Return what becomes of what is learned, by all levers together."""
    return max((lever.effect for lever in levers), key=EFFECTS.index)


def without(turned: Turned, lever: Lever) -> Turned:
    """Return all levers but one."""
    return {other: move for other, move in turned.items() if other is not lever}


@dataclass(frozen=True)
class Descent:
    """A way down, from a config as it is written to one that lacks nothing."""

    trials: Trials
    levers: Sequence[Lever]
    """The levers that may be turned; the first that helps is turned first."""
    enough: Callable[[Trial], bool]
    """Tells whether a trial lacks nothing any more."""

    def ends(self, turned: Turned) -> bool:
        """Return whether the levers can be turned so, and that is enough."""
        return self.is_enough(move_of(turned))

    def is_enough(self, move: Move) -> bool:
        """Return whether a move can be made, and is enough."""
        trial = self.trials.of(move)
        return trial is not None and self.enough(trial)

    def down(self, first: Lever | None = None) -> Turned:
        """Return the levers that are turned where the way ends: in what is enough, or in what no
        lever makes better.

        Args:
            first: the lever that is turned before all others, if it helps.
        """
        turned: Turned = {} if first is None else self._further({}, [first]) or {}
        while not self.ends(turned):
            further = self._further(turned, self.levers)
            if further is None:
                return turned
            turned = further
        return turned

    def _further(self, turned: Turned, levers: Sequence[Lever]) -> Turned | None:
        """Return the levers with one more turned, or one turned further, after which less lacks:
        the first that has such a move, with the most that it can write; None if none has."""
        trial = self.trials.of(move_of(turned))
        assert trial is not None, "turned to what contradicts the rest"
        for lever in filter(trial.is_helped_by, levers):
            others = without(turned, lever)
            for move in reversed(self._offers(others, lever)):
                made = self.trials.of({**move_of(others), **move})
                if made is not None and made.lacking < trial.lacking:
                    return {**others, lever: move}
        return None

    def _offers(self, others: Turned, lever: Lever) -> Sequence[Move]:
        """Return what a lever may write beside others."""
        trial = self.trials.of(move_of(others))
        return [] if trial is None else moves_of(lever, trial.situation)

    def take_back(self, turned: Turned, kept: Lever | None = None) -> Turned:
        """Return fewer levers that are enough as well, none of them dearer; each without the keys
        that need not be written, and with the mildest that is enough.

        Args:
            kept: a lever that is not taken back while others can be; nothing is left if it is not
                needed then.
        """
        if kept is not None:
            turned = self._fewest(turned, kept)
            if self.ends(without(turned, kept)):
                return {}
        turned = self._trimmed(self._fewest(turned))
        for lever in turned:
            turned = self._milder(turned, lever)
        return self._trimmed(self.needed(turned))

    def needed(
        self, turned: Turned, kept: Lever | None = None, last: Lever | None = None
    ) -> Turned:
        """Return the levers without which it is not enough.

        Args:
            kept: a lever that is not taken back.
            last: the lever that is taken back last; before it, the cheapest first.
        """
        for lever in sorted(turned, key=lambda lever: (lever is last, lever.rank)):
            if lever is not kept and self.ends(without(turned, lever)):
                turned = without(turned, lever)
        return turned

    def _fewest(self, turned: Turned, kept: Lever | None = None) -> Turned:
        """Return the levers that are needed; if another lever of no other effect does instead of
        several or of a dearer one, with that one."""
        turned = self.needed(turned, kept)
        effect, most = effect_of(turned), max(lever.rank for lever in turned)
        for lever in self.levers:
            if lever.rank > most or lever in turned:
                continue
            alone, beside = self._offers({}, lever), self._offers(turned, lever)
            for move in (*alone[-1:], *reversed(beside)):
                fewer = self.needed({**turned, lever: move}, kept, last=lever)
                if effect_of(fewer) == effect and cost_of(fewer) < cost_of(turned):
                    return self._fewest(fewer, kept)
        return turned

    def _trimmed(self, turned: Turned) -> Turned:
        """Return the levers without the keys that need not be written, as far as their decisive
        keys stay for one role at least."""
        for lever, move in turned.items():
            for key in move:
                others = {name: value for name, value in turned[lever].items() if name != key}
                decisive = any(name.endswith(lever.keys[0]) for name in others)
                if decisive and self.ends({**turned, lever: others}):
                    turned = {**turned, lever: others}
        return turned

    def _milder(self, turned: Turned, lever: Lever) -> Turned:
        """Return the levers with the mildest of what one of them may write that is enough, beside
        the others."""
        others, keys = without(turned, lever), turned[lever].keys()
        written = move_of(others)
        moves = [
            {key: value for key, value in move.items() if key in keys}
            for move in self._offers(others, lever)
        ]
        mildest = first_enough(moves, lambda move: self.is_enough({**written, **move}))
        return {**others, lever: mildest} if mildest else turned


def first_enough(moves: Sequence[Move], is_enough: Callable[[Move], bool]) -> Move | None:
    """Return the first of some moves that is enough; None if none is, or the last of many is not.

    Args:
        moves: the mildest first. Among many, what comes after one that is enough is taken to be
            enough too.
    """
    if len(moves) <= _FEW:
        return next(filter(is_enough, moves), None)
    if not is_enough(moves[-1]):
        return None
    return moves[bisect_left(moves, True, hi=len(moves) - 1, key=is_enough)]
