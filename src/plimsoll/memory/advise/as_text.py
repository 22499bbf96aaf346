"""Advice as text in 80 columns, and as JSON values for programs.

The text has the answers side by side, or each as a diff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from plimsoll.config.problems import show
from plimsoll.memory.advise.advise import Advice, Suggestion
from plimsoll.memory.contents.stores import Store, Verdict
from plimsoll.memory.levers.changes import Change, split_key
from plimsoll.memory.plan.as_text import WIDTH, wrap_lines
from plimsoll.memory.weigh import Plan
from plimsoll.run.counting import gigabytes
from plimsoll.timeline.levers import Effect, LeverValue

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
    """Yield the lines of a table; a label that is too long is wrapped, a key after a dot."""
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
    """Return whether a change only writes out the reference's model, which is the actor's.

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
    answers = () if advice is None else advice.answers
    return {"suggestions": [_values(number, answer) for number, answer in enumerate(answers, 1)]}


def _values(number: int, answer: Suggestion) -> dict[str, Any]:
    return {
        "number": number,
        "changes": [{"key": c.key, "from": c.before, "to": c.after} for c in answer.changes],
        "flags": answer.flags,
        "effect": answer.effect,
        "verdict": answer.verdict,
        "device_bytes": answer.device_bytes,
        "host_bytes": answer.host_bytes,
        "costs": [EFFECT_WORDS[answer.effect], *answer.costs],
    }
