"""The descent to a config that fits: turn the cheapest lever that helps, again and again until it
does, and then take back whatever it does as well without."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from plimsoll.memory.levers.catalogue import moves_of
from plimsoll.memory.levers.trials import Trial, Trials
from plimsoll.timeline.levers import EFFECTS, Effect, Lever, Move, Value

Turned = Mapping[Lever, Move]
"""The levers that are turned, and what each of them writes."""
Enough = Callable[[Trial], bool]
"""Tells whether a trial lacks nothing any more."""


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


def descend(
    trials: Trials, levers: Sequence[Lever], enough: Enough, first: Lever | None = None
) -> Turned:
    """Return the levers that are turned where the way down ends: in what is enough, or in what no
    lever makes better.

    Args:
        levers: the levers that may be turned; the first that helps is turned first.
        first: the lever that is turned before all others, if it helps.
    """
    turned: Turned = {} if first is None else _turned_further(trials, {}, [first]) or {}
    while not is_enough(trials, move_of(turned), enough):
        further = _turned_further(trials, turned, levers)
        if further is None:
            return turned
        turned = further
    return turned


def _turned_further(trials: Trials, turned: Turned, levers: Sequence[Lever]) -> Turned | None:
    """Return the levers with one more turned, or one turned further, after which less lacks: the
    first that has such a move, with the most that it can write. None if there is no such lever."""
    trial = trials.of(move_of(turned))
    assert trial is not None, "turned to what contradicts the rest"
    for lever in levers:
        if trial.is_helped_by(lever):
            others = without(turned, lever)
            for move in reversed(_offers(trials, others, lever)):
                made = trials.of({**move_of(others), **move})
                if made is not None and made.lacking < trial.lacking:
                    return {**others, lever: move}
    return None


def _offers(trials: Trials, others: Turned, lever: Lever) -> Sequence[Move]:
    """Return what a lever may write beside others."""
    trial = trials.of(move_of(others))
    return [] if trial is None else moves_of(lever, trial.situation)


def take_back(
    trials: Trials,
    turned: Turned,
    enough: Enough,
    levers: Sequence[Lever] = (),
    kept: Lever | None = None,
) -> Turned:
    """Return fewer levers that are enough as well, none of them dearer; each without the keys that
    need not be written, and with the mildest that is enough.

    Args:
        levers: the levers that may be turned instead of others.
        kept: a lever that is not taken back while others can be; none is left if it is not needed.
    """
    if kept is not None:
        turned = _fewest(trials, turned, enough, levers, kept)
        if is_enough(trials, move_of(without(turned, kept)), enough):
            return {}
    turned = _trimmed(trials, _fewest(trials, turned, enough, levers), enough)
    for lever in turned:
        turned = _milder(trials, turned, lever, enough)
    return _trimmed(trials, needed(trials, turned, enough), enough)


def _trimmed(trials: Trials, turned: Turned, enough: Enough) -> Turned:
    """Return the levers without the keys that need not be written, as far as their decisive keys
    stay for one role at least."""
    for lever, move in turned.items():
        for key in move:
            others = {name: value for name, value in turned[lever].items() if name != key}
            fewer = {**turned, lever: others}
            decisive = any(name.endswith(lever.keys[0]) for name in others)
            if decisive and is_enough(trials, move_of(fewer), enough):
                turned = fewer
    return turned


def _fewest(
    trials: Trials,
    turned: Turned,
    enough: Enough,
    levers: Sequence[Lever],
    kept: Lever | None = None,
) -> Turned:
    """Return the levers that are needed; if another lever of no other effect does instead of
    several or of a dearer one, with that one."""
    turned = needed(trials, turned, enough, kept)
    effect, most = effect_of(turned), max(lever.rank for lever in turned)
    for lever in levers:
        if lever.rank <= most and lever not in turned:
            for move in (
                *_offers(trials, {}, lever)[-1:],
                *reversed(_offers(trials, turned, lever)),
            ):
                fewer = needed(trials, {**turned, lever: move}, enough, kept, lever)
                if effect_of(fewer) == effect and cost_of(fewer) < cost_of(turned):
                    return _fewest(trials, fewer, enough, levers, kept)
    return turned


def needed(
    trials: Trials,
    turned: Turned,
    enough: Enough,
    kept: Lever | None = None,
    last: Lever | None = None,
) -> Turned:
    """Return the levers without which it is not enough.

    Args:
        kept: a lever that is not taken back.
        last: the lever that is taken back last; before it, the cheapest first.
    """
    for lever in sorted(turned, key=lambda lever: (lever is last, lever.rank)):
        fewer = without(turned, lever)
        if lever is not kept and is_enough(trials, move_of(fewer), enough):
            turned = fewer
    return turned


def is_enough(trials: Trials, move: Move, enough: Enough) -> bool:
    """Return whether a move can be made, and is enough."""
    trial = trials.of(move)
    return trial is not None and enough(trial)


def _milder(trials: Trials, turned: Turned, lever: Lever, enough: Enough) -> Turned:
    """Return the levers with the mildest of what one of them may write that is enough, beside the
    others."""
    others, keys = without(turned, lever), turned[lever].keys()
    offers = _offers(trials, others, lever)
    moves = [{key: value for key, value in move.items() if key in keys} for move in offers]
    written = move_of(others)
    mildest = first_enough(moves, lambda move: is_enough(trials, {**written, **move}, enough))
    return {**others, lever: mildest} if mildest else turned


def first_enough(moves: Sequence[Move], has_enough: Callable[[Move], bool]) -> Move | None:
    """Return the first of some moves that is enough; None if none is, or the last of many is not.

    Args:
        moves: the mildest first. Among many, what comes after one that is enough is taken to be
            enough too.
    """
    if len(moves) <= _FEW:
        return next((move for move in moves if has_enough(move)), None)
    if not has_enough(moves[-1]):
        return None
    place = bisect_left(moves, True, hi=len(moves) - 1, key=has_enough)
    return moves[place]
