"""What a refusal says to do, tried: whatever it names, as a whole, leaves nothing lacking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from plimsoll.config.codes import Code
from plimsoll.config.problems import Problem
from plimsoll.memory.remedies.changes import Move, Remedy, Value, one_of

_DEEPEST = 3
"""Remedies on top of the first, for what still lacks after it."""
_MOST_TRIALS = 40
"""Plans for all shortages of a plan together: more would take seconds."""
_CHAINS = 2
"""Ways of several remedies that are named, where no single one does."""
OTHERS_STAY = " (the other errors stay)"
"""After what mends one error alone."""
_NOTHING = (
    "a smaller model, or larger cards or more of them: no change that was tried is enough; "
    "`plimsoll plan --suggest` tries more"
)


@dataclass(frozen=True)
class Shortage:
    """Memory that lacks: the problem without its fix, and what could be done, one or another."""

    problem: Problem
    remedies: tuple[Remedy, ...]

    @property
    def written(self) -> tuple[Remedy, ...]:
        """The remedies whose values are known."""
        return tuple(remedy for remedy in self.remedies if remedy.changes)


@dataclass(frozen=True)
class Trials:
    """Plans of the config with changes, each made once.

    plan: gives what still lacks after changes; None if they contradict the rest of the config, or
        break something else.
    """

    plan: Callable[[Move], Sequence[Shortage] | None]
    known: dict[frozenset[tuple[str, Value]], Sequence[Shortage] | None] = field(
        default_factory=dict
    )

    def after(self, move: Move) -> Sequence[Shortage] | None:
        """Return what still lacks after a move; None as of `plan`, or after too many trials."""
        key = frozenset(move.items())
        if key not in self.known:
            self.known[key] = self.plan(move) if len(self.known) < _MOST_TRIALS else None
        return self.known[key]

    def suffices(self, move: Move) -> bool:
        """Whether nothing lacks after a move."""
        lacking = self.after(move)
        return lacking is not None and not lacking

    def leaves(self, move: Move, codes: Set[Code | None]) -> bool:
        """Whether at most problems of these codes are left after a move."""
        lacking = self.after(move)
        return lacking is not None and {one.problem.code for one in lacking} <= codes


def with_ways_out(shortages: Sequence[Shortage], trials: Trials) -> Iterator[Problem]:
    """Yield the problems, each with the remedies after which nothing lacks: one by itself, or else
    with what still lacks after it. Where there are none, with those that mend this problem alone.
    Remedies in words, which cannot be tried, come last."""
    codes = {shortage.problem.code for shortage in shortages}
    for shortage in shortages:
        others = codes - {shortage.problem.code}
        words = [remedy for remedy in shortage.remedies if not remedy.changes]
        single = [remedy for remedy in shortage.written if trials.suffices(remedy.changes)]
        ways = single or _chains(shortage, trials)
        written = () if ways else shortage.written
        alone = [remedy for remedy in written if trials.leaves(remedy.changes, others)]
        best = [*_by_keys(reversed([*ways, *alone]))[::-1], *words]
        fix = f"{one_of(best)}{OTHERS_STAY if alone else ''}" if best else _NOTHING
        yield replace(shortage.problem, fix=fix)


def _by_keys(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Return the last of those that change the same keys."""
    return list({frozenset(remedy.changes): remedy for remedy in remedies}.values())


def _chains(shortage: Shortage, trials: Trials) -> list[Remedy]:
    """Return ways of several remedies, each with what is asked for after it: those on the machines
    given first, and of these the shortest."""
    chains: dict[frozenset[tuple[str, Value]], Move] = {}
    for remedy in _by_keys(shortage.written):
        way = _followed(remedy.changes, trials, _DEEPEST)
        if way is not None:
            needed = _trimmed(way, trials)
            chains[frozenset(needed.items())] = needed
    shortest = sorted(chains.values(), key=lambda way: ("cluster.nodes" in way, len(way)))
    return [Remedy(way) for way in shortest[:_CHAINS]]


def _followed(move: Move, trials: Trials, deepest: int) -> Move | None:
    """Return the move with the remedies of what still lacks after it, until nothing does; None
    where that cannot be reached."""
    lacking = trials.after(move)
    if lacking is None or (lacking and not deepest):
        return None
    if not lacking:
        return move
    for remedy in _by_keys(lacking[0].written):
        further: Mapping[str, Value] = {**move, **remedy.changes}
        way = None if further == move else _followed(further, trials, deepest - 1)
        if way is not None:
            return way
    return None


def _trimmed(move: Move, trials: Trials) -> Move:
    """Return the move without the changes that it does as well without."""
    for key in tuple(move):
        fewer = {name: value for name, value in move.items() if name != key}
        if trials.suffices(fewer):
            move = fewer
    return move
