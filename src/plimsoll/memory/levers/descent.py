"""The descent to a config that fits, and the ways out of a plan that does not.

The cheapest lever that helps is turned, again and again until the config fits. Then levers
that are not needed are taken back. Each way out was planned with all its changes together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from plimsoll.config.problems import Code, Problem, show
from plimsoll.memory.levers.levers import levers_by_rank, merge_moves, moves_of
from plimsoll.memory.levers.trials import Trial, Trials, changes_between
from plimsoll.memory.weigh import (
    Ground,
    Plan,
    Shortage,
    has_shortage,
    problems_besides,
    shortages_of,
)
from plimsoll.timeline.levers import EFFECTS, Effect, Lever, Move, halves

Turned = Mapping[Lever, Move]
"""The levers that are turned, each with its move."""
_FEW = 8
"""Moves of a lever that are all tried, one after another, where the mildest is wanted."""
_MANY = 128
"""Moves of a lever that are all tried where the strongest is wanted."""


def move_of(turned: Turned) -> Move:
    """Return the moves of all levers as one; if two set the same key, the later one holds."""
    return merge_moves(turned.values())


def cost_of(levers: Collection[Lever]) -> tuple[int, int, int]:
    """Return the cost of the levers, for comparisons: the highest rank, the count, the rank sum."""
    ranks = [lever.rank for lever in levers]
    return max(ranks), len(ranks), sum(ranks)


def effect_of(levers: Iterable[Lever]) -> Effect:
    """Return the strongest effect of the levers on the result of training."""
    return max((lever.effect for lever in levers), key=EFFECTS.index)


def without(turned: Turned, lever: Lever) -> Turned:
    """Return the turned levers without one of them."""
    return {kept: move for kept, move in turned.items() if kept is not lever}


@dataclass(frozen=True)
class Descent:
    """A search from a config as it is written to a config that has enough memory."""

    trials: Trials
    levers: Sequence[Lever]
    """The levers that may be turned, in the order in which they are tried."""
    enough: Callable[[Trial], bool]
    """Returns whether a trial is good enough to end the search."""

    def ends(self, turned: Turned) -> bool:
        """Return whether these moves are possible together, and enough."""
        return self.is_enough(move_of(turned))

    def is_enough(self, move: Move) -> bool:
        """Return whether a move is possible, and enough."""
        trial = self.trials.of(move)
        return trial is not None and self.enough(trial)

    def descend(self, first: Lever | None = None) -> Turned:
        """Turn levers until the trial is enough or no lever helps; return the turned levers.

        Args:
            first: the lever that is turned before all others, even if another shortage takes the
                place of the one that it ends.
        """
        turned: Turned = {} if first is None else self._turn_first(first)
        while not self.ends(turned):
            further = self._turn_next(turned, self.levers)
            if further is None:
                return turned
            turned = further
        return turned

    def _turn_first(self, lever: Lever) -> Turned:
        """Return the lever turned as far as possible; nothing turned if it cannot help."""
        if not self.trials.root.is_helped_by(lever):
            return {}
        moves = strongest_first(self._offers({}, lever))
        return next(({lever: move} for move in moves if self.trials.of(move) is not None), {})

    def _turn_next(self, turned: Turned, levers: Sequence[Lever]) -> Turned | None:
        """Return the levers with one more turned, or turned further; None if no lever helps.

        This is the first lever that has a move after which less is lacking. It makes the strongest
        of these moves.
        """
        trial = self.trials.of(move_of(turned))
        assert trial is not None, "turned to what contradicts the rest"
        for lever in filter(trial.is_helped_by, levers):
            others = without(turned, lever)
            for move in strongest_first(self._offers(others, lever)):
                made = self.trials.of({**move_of(others), **move})
                if made is not None and made.lacking < trial.lacking:
                    return {**others, lever: move}
        return None

    def _offers(self, others: Turned, lever: Lever) -> Sequence[Move]:
        """Return the moves that a lever still offers when the other levers are turned."""
        trial = self.trials.of(move_of(others))
        return [] if trial is None else moves_of(lever, trial.situation)

    def take_back(self, turned: Turned, kept: Lever | None = None) -> Turned:
        """Return as few levers as are still enough, each with its mildest move that is enough.

        No lever is dearer than before. Keys that are not needed are left out.

        Args:
            turned: the levers before.
            kept: a lever that is taken back only after all others. If it is not needed then, the
                result is empty.
        """
        if kept is not None:
            turned = self._fewest(turned, kept)
            if self.ends(without(turned, kept)):
                return {}
        turned = self._trim(self._fewest(turned))
        for lever in turned:
            turned = self._make_milder(turned, lever)
        return self._trim(self.keep_needed(turned))

    def keep_needed(
        self, turned: Turned, kept: Lever | None = None, last: Lever | None = None
    ) -> Turned:
        """Return the levers that are needed: without any of them the others are not enough.

        Args:
            turned: the levers before.
            kept: a lever that is not taken back.
            last: the lever that is taken back last; the others are taken back cheapest first.
        """
        for lever in sorted(turned, key=lambda lever: (lever is last, lever.rank)):
            if lever is not kept and self.ends(without(turned, lever)):
                turned = without(turned, lever)
        return turned

    def _fewest(self, turned: Turned, kept: Lever | None = None) -> Turned:
        """Return the needed levers, with replacements that cost less.

        A lever of the same effect may replace several levers, or a dearer one.
        """
        turned = self.keep_needed(turned, kept)
        effect, most = effect_of(turned), max(lever.rank for lever in turned)
        for lever in self.levers:
            if lever.rank > most or lever in turned:
                continue
            alone, beside = self._offers({}, lever), self._offers(turned, lever)
            for move in (*alone[-1:], *strongest_first(beside)):
                fewer = self.keep_needed({**turned, lever: move}, kept, last=lever)
                if effect_of(fewer) == effect and cost_of(fewer) < cost_of(turned):
                    return self._fewest(fewer, kept)
        return turned

    def _trim(self, turned: Turned) -> Turned:
        """Return the levers without keys that are not needed.

        The decisive key of a lever stays for one role at least.
        """
        for lever, move in turned.items():
            for key in move:
                rest = {name: value for name, value in turned[lever].items() if name != key}
                decisive = any(name.endswith(lever.keys[0]) for name in rest)
                if decisive and self.ends({**turned, lever: rest}):
                    turned = {**turned, lever: rest}
        return turned

    def _make_milder(self, turned: Turned, lever: Lever) -> Turned:
        """Return the levers, with one of them at its mildest move that is enough."""
        others, keys = without(turned, lever), turned[lever].keys()
        other_keys = move_of(others)
        moves = [
            {key: value for key, value in move.items() if key in keys}
            for move in self._offers(others, lever)
        ]
        mildest = first_enough(moves, lambda move: self.is_enough({**other_keys, **move}))
        return {**others, lever: mildest} if mildest else turned


def strongest_first(moves: Sequence[Move]) -> Sequence[Move]:
    """Return the moves to try, the strongest first.

    All of up to 128 moves are tried. Of more, which thousands of cards offer, these are the
    strongest one, the one half as far, the one a quarter as far, and so on.
    """
    last = len(moves) - 1
    places = range(last, -1, -1) if last < _MANY else [last, *halves(last, 0)]
    return [moves[place] for place in places]


def first_enough(moves: Sequence[Move], is_enough: Callable[[Move], bool]) -> Move | None:
    """Return the mildest move that is enough; None if no move is.

    Args:
        moves: the mildest first. If there are more than 8, every move after one that is enough is
            assumed to be enough too.
        is_enough: returns whether a move is enough.
    """
    if len(moves) <= _FEW:
        return next(filter(is_enough, moves), None)
    if not is_enough(moves[-1]):
        return None
    return moves[bisect_left(moves, True, hi=len(moves) - 1, key=is_enough)]


_MOST_WAYS = 4
"""The number of ways that a fix names: the cheapest ones."""
OTHERS_STAY = " (the other errors stay)"
"""The text after ways that mend only one of several errors."""
RISKY = " (risky: closer than the plan is exact)"
"""The text after a way that leaves less room than the plan may be off by."""
_NOTHING = (
    "a smaller model, or larger cards or more of them: no change that was tried is enough; "
    "`plimsoll plan --suggest` tries more"
)


def with_ways_out(plan: Plan, ground: Ground) -> Iterator[Problem]:
    """Yield a problem for each shortage of a plan; its fix has settings that end all shortages.

    The fix has moves of single levers. If all of them change the result of training, a move of
    several levers together comes first. If nothing ends all shortages, the fix has moves that end
    this shortage alone.
    """
    shortages = shortages_of(plan)
    trials = Trials(plan.job.spec, ground, {frozenset(): Trial(frozenset(), plan)})
    kept = _errors(plan)
    codes = frozenset(shortage.problem.code for shortage in shortages)

    def has_enough(trial: Trial, left: frozenset[Code | None] = frozenset()) -> bool:
        if not left and has_shortage(trial.plan):
            return False
        lacking = {shortage.problem.code for shortage in shortages_of(trial.plan)}
        return lacking <= left and _errors(trial.plan) <= kept

    way = Descent(trials, levers_by_rank(), has_enough)
    together: list[Move] | None = None
    for shortage in shortages:
        single = _singly(way, shortage)
        if all(lever.effect != "same" for lever in single):
            together = _together(way) if together is None else together
        ways = [*(together or []), *single.values()]
        others = partial(has_enough, left=codes - {shortage.problem.code})
        alone = [] if ways else [*_singly(replace(way, enough=others), shortage).values()]
        texts = dict.fromkeys(_text(trials, move) for move in [*ways, *alone])
        fix = ", or ".join([*texts][:_MOST_WAYS]) or _NOTHING
        yield replace(shortage.problem, fix=f"{fix}{OTHERS_STAY if alone else ''}")


def _text(trials: Trials, move: Move) -> str:
    """Return the settings of a move that change something, joined by "with", and its risk."""
    settings = " with ".join(
        f"{c.key}: {c.after:.2f}" if isinstance(c.after, float) else f"{c.key}: {show(c.after)}"
        for c in changes_between(trials.spec, dict(sorted(move.items())))
    )
    trial = trials.of(move)
    return settings + RISKY * (trial is not None and trial.plan.verdict == "risky")


def _errors(plan: Plan) -> set[Code | None]:
    return {problem.code for problem in problems_besides(plan) if problem.severity == "error"}


def _singly(way: Descent, shortage: Shortage) -> Mapping[Lever, Move]:
    """Return the mildest move of each single lever that is enough, the cheapest lever first."""
    levers = (lever for lever in way.levers if _is_for(lever, shortage))
    mildest = ((lever, _mildest(way, lever, shortage)) for lever in levers)
    return dict(islice(((lever, move) for lever, move in mildest if move), _MOST_WAYS))


def _is_for(lever: Lever, shortage: Shortage) -> bool:
    """Return whether a lever may mend a shortage."""
    top = shortage.top
    if top is None:
        return shortage.problem.code in lever.codes
    return any(relief.covers(top.kind, top.where, top.phase) for relief in lever.reliefs)


def _mildest(way: Descent, lever: Lever, shortage: Shortage) -> Move | None:
    """Return the mildest move of a lever that is enough; None if none is.

    If the lever has keys of the role whose items lack room, only that role is changed.
    """
    top, at = shortage.top, way.trials.root.situation
    role = top.role if top and top.role in lever.roles(at.spec) else None
    return first_enough(moves_of(lever, at, role), way.is_enough)


def _together(way: Descent) -> list[Move]:
    """Return a move of several levers that is enough; nothing if there is none.

    The one that changes the result of training least, if possible on the given machines.
    """
    errors = {problem.code for problem in way.trials.root.plan.problems}
    firsts = [None, *(lever for lever in way.levers if lever.codes & errors)]
    ends = [turned for turned in map(way.descend, firsts) if turned and way.ends(turned)]
    if not ends:
        return []
    best = min(ends, key=lambda turned: (EFFECTS.index(effect_of(turned)), cost_of(turned)))
    return [move_of(replace(way, levers=()).take_back(best))]
