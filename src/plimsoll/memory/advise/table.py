"""The answers side by side, for a person to choose from: what each changes, needs and gives up; 80
columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from plimsoll.config.problems import show
from plimsoll.memory.advise.advise import Advice
from plimsoll.memory.advise.clusters import Cluster
from plimsoll.memory.advise.costs import speed_words
from plimsoll.memory.advise.effects import ON_MORE_MACHINES, effect_words, kind_of
from plimsoll.memory.advise.suggestion import Suggestion
from plimsoll.memory.contents.stores import Store, Verdict
from plimsoll.memory.plan.as_text import WIDTH, wrap_lines
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.remedies.changes import Change, Value
from plimsoll.run.counting import counted, gigabytes
from plimsoll.spec.run_spec import RunSpec

Row = tuple[str, Sequence[str]]
"""What is compared, and a cell for the config as written and for each answer."""

_DOT, _SPACED = re.compile(r"\.(?=[a-z])"), re.compile(r"\. (?=[a-z])")
"""Within a key: not in numbers."""

_FITS: Mapping[Verdict, str] = {"fits": "yes", "risky": "risky", "does not fit": "no"}
_LEARNED = {
    "same learning": "the same",
    "rounding": "rounded",
    "adapters": "adapters",
    "shorter sequences": "shorter",
}

_TIMES = (
    "x is the time of a step as written, if it had room. It is estimated from FLOPs, bytes moved "
    "and the rates of known cards: good for ranking, not for timing"
)


def answers_text(advice: Advice, plan: Plan) -> str:
    """The answers beside the config as written, what each gives up, and what other machines would
    do. plan: of the config as written."""
    return "\n".join([*_answers(advice, plan), *_machines(advice, plan), *_left(advice)])


def _answers(advice: Advice, plan: Plan) -> Iterator[str]:
    if not advice.answers:
        what = "is faster and fits too" if advice.fits else "fits on these machines"
        yield f"nothing that was tried {what}"
        return
    certain = advice.answers[0].verdict == "fits"
    what = "is faster and fits too" if advice.fits else "fits" if certain else "may fit"
    numbers = [str(number) for number, _ in enumerate(advice.answers, 1)]
    head: Row = f"what {what} on these machines", ["as written", *numbers]
    yield from _table([head, *_results(advice.answers, plan), *_settings(advice.answers, plan)])
    for number, one in zip(numbers, advice.answers, strict=True):
        yield wrap_lines(f"  {number} gives up: {'; '.join(_given_up(one)) or 'nothing'}", "    ")
    yield wrap_lines(f"  {_TIMES}", "    ")


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """A label that is too long for its column goes on below; a key, after one of its dots."""
    columns = zip(*(cells for _, cells in rows), strict=True)
    widths = [2 + max(map(len, column)) for column in columns]
    room = WIDTH - sum(widths)
    for label, cells in rows:
        spaced = wrap_lines(_DOT.sub(". ", label), "    ", room).splitlines()
        first, *more = [_SPACED.sub(".", line) for line in spaced]
        told = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{first:<{room}}{told}".rstrip()
        yield from more


def _results(answers: Sequence[Suggestion], plan: Plan) -> Iterator[Row]:
    yield "  fits", [_FITS[plan.verdict], *(_FITS[one.verdict] for one in answers)]
    yield "  what is learned", ["", *(_learned(one) for one in answers)]
    if plan.devices:
        sizes = [one.device_bytes for one in answers]
        yield _peaks("card", plan.devices, sizes)
    yield _peaks("host", plan.hosts, [one.host_bytes for one in answers])
    times = [1.0, *(one.relative_seconds for one in answers)]
    yield "  time of a step", [f"{time:.1f} x" for time in times]


def _learned(one: Suggestion) -> str:
    kind = kind_of(one.changes)
    assert kind is not None, "an answer on more machines"
    return _LEARNED[kind]


def _peaks(where: str, stores: Sequence[Store], answers: Sequence[int]) -> Row:
    rooms = [store.capacity for store in stores if store.capacity is not None]
    room = f" of {gigabytes(min(rooms))}" if rooms else ""
    written = max(store.peak.bytes for store in stores)
    return f"  peak on a {where}, GB{room}", [gigabytes(size) for size in (written, *answers)]


def _settings(answers: Sequence[Suggestion], plan: Plan) -> Iterator[Row]:
    """Yield a row for each key that any of them changes, empty where it stays; roles that are
    changed alike have one row together."""
    made = [{change.key: change for change in one.changes} for one in answers]
    keys = sorted({key for changes in made for key, one in changes.items() if not _repeats(one)})
    rows = []
    for key in keys:
        before = next(changes[key].before for changes in made if key in changes)
        cells = [_cell(before), *(_after(changes.get(key)) for changes in made)]
        role, setting = _split(plan.job.spec, key)
        rows.append((setting, cells, role))
    for (setting, cells), alike in groupby(sorted(rows), key=lambda row: row[:2]):
        roles = [role for *_, role in alike if role]
        between = ": " if len(roles) > 1 else "." * len(roles)
        yield f"  {', '.join(roles)}{between}{setting}", cells


def _repeats(change: Change) -> bool:
    """Whether a change only writes out the model of a reference, which is the actor's: another key
    of the reference cannot stand without it."""
    return change.before is None and change.key.startswith("reference.model.")


def _split(spec: RunSpec[Any], key: str) -> tuple[str, str]:
    """The key of the role that a key is of, and the rest; "" for other keys."""
    roles = [role.key for role in spec.roles.values() if key.startswith(f"{role.key}.")]
    return (roles[0], key.removeprefix(f"{roles[0]}.")) if roles else ("", key)


def _cell(value: Value) -> str:
    return "-" if value is None else show(value)


def _after(change: Change | None) -> str:
    return "" if change is None else _cell(change.after)


def _given_up(one: Suggestion) -> list[str]:
    """All costs but those that have rows."""
    told = (effect_words(one.changes), speed_words(one.relative_seconds))
    return [cost for cost in one.costs if cost not in told]


def _machines(advice: Advice, plan: Plan) -> Iterator[str]:
    """What more or other cards would do, in a line."""
    if advice.fits:
        return
    ways = [
        f"on {_cluster_words(one)} (answer {advice.number_of(one.suggestion)})"
        for one in (advice.smallest_cluster, advice.other_cards)
        if one is not None
    ]
    if ways:
        yield wrap_lines(f"as written it fits {', or '.join(ways)}", "  ")
        return
    more = [i for i, one in enumerate(advice.numbered, 1) if one.effect in ON_MORE_MACHINES]
    changed = f"; changed, on more of them (answer {more[0]})" if more else ""
    these = "these or larger cards" if plan.devices else "these machines"
    yield wrap_lines(f"as written it fits on no number of {these}{changed}", "  ")


def _cluster_words(cluster: Cluster) -> str:
    """Such as `3 nodes` or `2 nodes of 4xA100-80GB`."""
    after = {change.key: change.after for change in cluster.suggestion.changes}
    nodes = counted(cluster.nodes, "node")
    hardware = after.get("cluster.hardware")
    if "cluster.nodes" not in after and hardware is None:
        return f"{after['cluster.ranks']} ranks of these machines"
    return nodes if hardware is None else f"{nodes} of {hardware}"


def _left(advice: Advice) -> Iterator[str]:
    if count := len(advice.numbered):
        yield wrap_lines(
            f"`plimsoll plan --apply N [-o FILE]` writes the config with answer N; `--suggest "
            f"--all` shows all {count} in full",
            "  ",
        )
