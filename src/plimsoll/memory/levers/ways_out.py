"""The ways out of a plan that does not fit; each was planned as a whole, and has no shortage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from plimsoll.config.codes import Code
from plimsoll.config.problems import Problem, show
from plimsoll.memory.levers.catalogue import levers_by_rank, moves_of
from plimsoll.memory.levers.changes import changes_between
from plimsoll.memory.levers.descent import Descent, first_enough, move_of
from plimsoll.memory.levers.trials import Trial, Trials
from plimsoll.memory.rules.shortages import Shortage
from plimsoll.memory.weigh import Ground, Plan, has_shortage, problems_besides, shortages_of
from plimsoll.timeline.levers import Lever, Move

_MOST_WAYS = 4
"""The number of ways that a fix names: the cheapest ones."""
OTHERS_STAY = " (the other errors stay)"
"""The text after ways that mend only one of several errors."""
_NOTHING = (
    "a smaller model, or larger cards or more of them: no change that was tried is enough; "
    "`plimsoll plan --suggest` tries more"
)


def with_ways_out(plan: Plan, ground: Ground) -> Iterator[Problem]:
    """Yield the shortages of a plan as problems, each with the settings that end all shortages.

    These are moves of single levers. If none of them leaves the result of training the same, a move
    of several levers together comes first. If there are none, the fix has moves that mend this
    problem alone.
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
    """Return the settings of a move that change something, joined by "with"."""
    return " with ".join(
        f"{c.key}: {c.after:.2f}" if isinstance(c.after, float) else f"{c.key}: {show(c.after)}"
        for c in changes_between(trials.spec, dict(sorted(move.items())))
    )


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
    """Return a move of several levers that is enough; nothing if there is none."""
    turned = way.descend()
    return [move_of(replace(way, levers=()).take_back(turned))] if way.ends(turned) else []
