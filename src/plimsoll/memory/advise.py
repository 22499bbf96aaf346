"""The changes that would make a config fit, the cost of each, and their texts in 80 columns.

One answer is the smallest change: the cheapest levers are turned until the config fits, and those
that are not needed are taken back. The other answers are of other kinds. For them the levers of the
kind are turned first, so that a person may choose an adapter, for example, instead of offload.

The text has the answers side by side, or each as a diff. Programs get JSON values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from plimsoll.config.problems import Code, show
from plimsoll.memory.contents.stores import Store, Verdict
from plimsoll.memory.levers.descent import Descent, Turned, cost_of, effect_of, move_of
from plimsoll.memory.levers.levers import levers_by_rank
from plimsoll.memory.levers.trials import Change, Trial, Trials, changes_between, split_key
from plimsoll.memory.plan import WIDTH, wrap_lines
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import gigabytes
from plimsoll.timeline.levers import EFFECTS, Effect, Lever, LeverValue

_SLOW: Code = "few-at-once"
_MOST_HERE = 3
"""The most answers on the given machines; there is one more on more machines."""
_BESIDE: Mapping[Effect, tuple[Effect, ...]] = {
    "same": (),
    "rounding": ("same",),
    "adapters": ("same", "rounding"),
    "machines": ("same",),
    "shorter": (),
}
"""The milder effects that the levers of an answer may have, by the effect of the answer."""


@dataclass(frozen=True)
class Suggestion:
    """Changes that make a config fit."""

    changes: tuple[Change, ...]
    """The changes, sorted by key."""
    levers: tuple[Lever, ...]
    """The levers that make them, the cheapest first."""
    verdict: Verdict
    device_bytes: int
    """Peak of the fullest card; 0 without cards."""
    host_bytes: int
    """Peak of the fullest host."""
    slow: tuple[str, ...] = ()
    """What makes it slow, although it fits."""

    @property
    def effect(self) -> Effect:
        """The effect of all changes together on the result of training."""
        return effect_of(self.levers)

    @property
    def costs(self) -> tuple[str, ...]:
        """What is given up, in words."""
        return tuple(dict.fromkeys((*(lever.cost for lever in self.levers), *self.slow)))

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
    effects = EFFECTS if trials.root.rank else ()
    yield from filter(None, (_of_kind(trials, effect) for effect in effects))


def _drop_extensions(suggestions: Sequence[Suggestion]) -> Iterator[Suggestion]:
    """Yield each suggestion that does not change all the keys which an earlier one changes."""
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
    """Return the levers that a descent needs; empty if its verdict is no better than as written."""
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
        slow=tuple(problem.what for problem in plan.problems if problem.code == _SLOW),
    )


_Line = tuple[str, Sequence[str]]
"""A label, and a cell for the config as written and for each answer."""

_DOT, _SPACED = re.compile(r"\.(?=[a-z])"), re.compile(r"\. (?=[a-z])")
"""A dot within a key, which is not the dot of a number."""

_FITS: Mapping[Verdict, str] = {"fits": "yes", "risky": "risky", "does not fit": "no"}
_LEARNED: Mapping[Effect, str] = {
    "same": "the same",
    "rounding": "rounded",
    "adapters": "adapters",
    "shorter": "shorter",
    "machines": "the same",
}
EFFECT_WORDS: Mapping[Effect, str] = {
    "same": "what is learned stays the same",
    "rounding": "what is learned stays the same but for rounding",
    "adapters": "what is learned changes: adapters learn",
    "shorter": "what is learned changes: sequences are shorter",
    "machines": "what is learned stays the same, on more machines",
}
_ALL_FIT = "it fits as it is written: nothing to change"
_NOTHING = "nothing that was tried would fit"


def answers_text(advice: Advice, plan: Plan) -> str:
    """Return a table of the answers beside the config as written, and the costs of each answer.

    Args:
        advice: the answers.
        plan: the plan of the config as written.
    """
    if not advice.answers:
        return _ALL_FIT if advice.fits else _NOTHING
    answers, certain = advice.answers, advice.answers[0].verdict == "fits"
    numbers = [str(number) for number, _ in enumerate(answers, 1)]
    head: _Line = f"what {'fits' if certain else 'may fit'}", ["as written", *numbers]
    lines = [head, *_results(answers, plan), *_settings(answers, plan)]
    given_up = (
        wrap_lines(f"  {number} gives up: {'; '.join(answer.costs)}", "    ")
        for number, answer in zip(numbers, answers, strict=True)
    )
    how = "`plimsoll plan --apply N [-o FILE]` writes the config with answer N; `--suggest --all` "
    return "\n".join([*_table(lines), *given_up, wrap_lines(f"{how}shows all as diffs", "  ")])


def _table(lines: Sequence[_Line]) -> Iterator[str]:
    """Yield the lines of a table; long labels are wrapped, and keys only after a dot."""
    columns = zip(*(cells for _, cells in lines), strict=True)
    widths = [2 + max(map(len, column)) for column in columns]
    room = WIDTH - sum(widths)
    for label, cells in lines:
        spaced = wrap_lines(_DOT.sub(". ", label), "    ", room).splitlines()
        first, *more = [_SPACED.sub(".", line) for line in spaced]
        padded = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{first:<{room}}{padded}".rstrip()
        yield from more


def _results(answers: Sequence[Suggestion], plan: Plan) -> Iterator[_Line]:
    yield "  fits", [_FITS[plan.verdict], *(_FITS[answer.verdict] for answer in answers)]
    yield "  what is learned", ["", *(_LEARNED[answer.effect] for answer in answers)]
    if plan.devices:
        yield _peaks("card", plan.devices, [answer.device_bytes for answer in answers])
    yield _peaks("host", plan.hosts, [answer.host_bytes for answer in answers])


def _peaks(where: str, stores: Sequence[Store], answers: Sequence[int]) -> _Line:
    rooms = [store.capacity for store in stores if store.capacity is not None]
    room = f" of {gigabytes(min(rooms))}" if rooms else ""
    written = max(store.peak.bytes for store in stores)
    return f"  peak on a {where}, GB{room}", [gigabytes(size) for size in (written, *answers)]


def _settings(answers: Sequence[Suggestion], plan: Plan) -> Iterator[_Line]:
    """Yield a line for each key that any answer changes, with empty cells where the value stays.

    Roles with the same changes share a line.
    """
    by_key = [{change.key: change for change in answer.changes} for answer in answers]
    changed = (change for changes in by_key for change in changes.values())
    settings = []
    for key in sorted({change.key for change in changed if not _repeats(change)}):
        before = next(changes[key].before for changes in by_key if key in changes)
        cells = [_cell(before), *(_after(changes.get(key)) for changes in by_key)]
        role, setting = split_key(plan.job.spec, key)
        settings.append((setting, cells, "" if role is None else role.key))
    for (setting, cells), equal in groupby(sorted(settings), key=lambda entry: entry[:2]):
        roles = [role_key for *_, role_key in equal if role_key]
        between = ": " if len(roles) > 1 else "." * len(roles)
        yield f"  {', '.join(roles)}{between}{setting}", cells


def _repeats(change: Change) -> bool:
    """Return whether a change only copies a key of the actor's model to the reference.

    The config needs these keys as soon as it has another key of the reference.
    """
    return change.before is None and change.key.startswith("reference.model.")


def _cell(value: LeverValue) -> str:
    return "-" if value is None else show(value)


def _after(change: Change | None) -> str:
    return "" if change is None else _cell(change.after)


def advice_text(advice: Advice) -> str:
    """Return every answer by its number, as a diff with its costs."""
    if not advice.answers:
        return _ALL_FIT if advice.fits else _NOTHING
    lines = ["what would fit, one answer of each kind:"]
    for number, answer in enumerate(advice.answers, 1):
        on_card, on_host = gigabytes(answer.device_bytes), gigabytes(answer.host_bytes)
        card = f"at most {on_card} GB on a card, " if answer.device_bytes else ""
        sizes = f"{card or 'at most '}{on_host} GB on a host"
        lines += [wrap_lines(f"{number}. {answer.verdict}: {sizes}", "   "), *change_lines(answer)]
    return "\n".join(lines)


def change_lines(suggestion: Suggestion) -> Iterator[str]:
    """Yield the diff of a suggestion, and its costs."""
    yield from (f"   {line}" for change in suggestion.changes for line in change.lines)
    costs = (EFFECT_WORDS[suggestion.effect], *suggestion.costs)
    yield from (wrap_lines(f"     {cost}", "     ") for cost in costs)


def advice_values(advice: Advice | None) -> dict[str, Any]:
    """Return the suggestions as JSON values; none if there is no advice."""
    suggestions = [
        {
            "number": number,
            "changes": [{"key": c.key, "from": c.before, "to": c.after} for c in answer.changes],
            "flags": answer.flags,
            "effect": answer.effect,
            "verdict": answer.verdict,
            "device_bytes": answer.device_bytes,
            "host_bytes": answer.host_bytes,
            "costs": [EFFECT_WORDS[answer.effect], *answer.costs],
        }
        for number, answer in enumerate(() if advice is None else advice.answers, 1)
    ]
    return {"suggestions": suggestions}
