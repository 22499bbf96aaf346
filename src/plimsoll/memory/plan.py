"""Make the plan of a run, and render it as text of 80 columns or as JSON values.

The text has tables, bars, problems and the verdict; a short form fits one screen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plimsoll.config.problems import Problem
from plimsoll.machine.hardware import known_card
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.memory.contents.overheads import constant_values
from plimsoll.memory.contents.stores import (
    Store,
    Use,
    likely_worst,
    verdict_of,
)
from plimsoll.memory.levers.descent import with_ways_out
from plimsoll.memory.weigh import Ground, Plan, find_close, problems_besides, weigh
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.run.numbers import duration_text, gigabytes, plural
from plimsoll.timeline.items import KINDS, Item, Kind


def make_plan(spec: RunSpec[Any], ground: Ground) -> Plan:
    """Return the plan of a run; its shortages name the settings that end them.

    Raises ConfigError if the shape of a model is unknown.
    """
    plan = weigh(spec, ground)
    close = find_close(plan.stores, plan.band)
    problems = (*problems_besides(plan), *with_ways_out(plan, ground), *close)
    return replace(plan, problems=problems)


_OF_PROBLEMS = ("code", "severity", "what", "why", "fix")


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, with an entry for each kind of card and host.

    An entry has the number and the places of equal cards or hosts. Items are given for the fullest
    instant of each phase: for each kind, they add up to the bytes that one card or host holds then.
    """
    return {
        "verdict": plan.verdict,
        "band": plan.band.share,
        "devices": [_place(store) | {"peak": _card_peak(store.peak)} for store in plan.devices],
        "hosts": [_place(store) | _nodes_and_peak(store) for store in plan.hosts],
        "disk": {"bytes": plan.disk_bytes},
        "items": [
            *(row for store in plan.stores for row in _items(store)),
            *(_item(item, "save", "written", "run directory") for item in plan.disk),
        ],
        "problems": problem_values(plan),
        "constants": constant_values(plan.constants),
    }


def problem_values(plan: Plan) -> list[dict[str, Any]]:
    """Return the problems of a plan as JSON values."""
    return [{key: getattr(problem, key) for key in _OF_PROBLEMS} for problem in plan.problems]


def _place(store: Store) -> dict[str, Any]:
    return {"device": store.places, "count": store.count, "capacity_bytes": store.capacity}


def _card_peak(use: Use) -> dict[str, Any]:
    """Return the peak of a card as torch and the driver would report it."""
    sizes = {"allocated_bytes": use.allocated, "reserved_bytes": use.reserved}
    return {"phase": use.moment.phase, **sizes, "device_bytes": use.bytes}


def _nodes_and_peak(store: Store) -> dict[str, Any]:
    peak = {"phase": store.peak.moment.phase, "bytes": store.peak.bytes}
    return {"nodes": [slot.node for slot in store.slots], "peak": peak}


def _items(store: Store) -> Iterator[dict[str, Any]]:
    places = store.places
    for use in store.phases:
        for item in use.items:
            yield _item(item, use.moment.phase, use.moment.instant, places)


def _item(item: Item, phase: str, instant: str, device: str) -> dict[str, Any]:
    return {
        "role": item.role,
        "phase": phase,
        "instant": instant,
        "item": item.name,
        "where": item.where,
        "device": device,
        "bytes": item.bytes,
        "formula": item.formula,
        "source": item.source,
    }


WIDTH = 80
_COLUMN = 7
_SMALL = 0.004
"""Items that are below this share of the peak in every phase are added up in one row."""
_ROWS = 8
"""Rows of a short table, for the largest items."""

_SHORT: Mapping[Phase, str] = {"precompute": "before", "rollout": "roll"}
"""Names of phases in a narrow column; that of a role's training is the role's."""

_TableRow = tuple[str, Mapping[Phase, int]]

_BAR = 56
_UNICODE = "█▓▒░▞▤▪·"
_ASCII = "#=+-%*o."


def plan_text(plan: Plan, *, unicode: bool) -> str:
    """Return a table and bars for each group of equal cards or hosts, and the verdict."""
    parts = [f"{store_table(store)}\n  {_store_verdict(store, plan)}" for store in plan.stores]
    parts += [draw_bars(store, unicode=unicode) for store in plan.stores]
    return "\n\n".join([*parts, verdict_text(plan, sources=True)])


def short_text(plan: Plan) -> str:
    """Return the plan on one screen.

    Stores that are risky or do not fit get a short table. If there are none, the fullest card gets
    it (without cards, the fullest host). Every other store gets a line; the verdict comes last.
    """
    unsure = [store for store in plan.stores if verdict_of(store, plan.band) != "fits"]
    fullest = max(plan.devices or plan.hosts, key=lambda store: _fullness(store, plan))
    tabled = unsure or [fullest]
    parts = [f"{store_table(store, _ROWS)}\n  {_store_verdict(store, plan)}" for store in tabled]
    lines = [_store_line(store, plan) for store in plan.stores if store not in tabled]
    more = "`plimsoll plan --all` shows every item, and draws them"
    return "\n\n".join([*parts, "\n".join([*lines, more, verdict_text(plan)])])


def _short(phase: Phase) -> str:
    return _SHORT.get(phase, phase.removeprefix("train_"))


def _fullness(store: Store, plan: Plan) -> float:
    return likely_worst(store.peak, plan.band) / (store.capacity or 1)


def verdict_text(plan: Plan, *, sources: bool = False) -> str:
    """Return the lines on the disk, the error band, the problems and the verdict.

    `sources` adds the source of the error band.
    """
    saved = " and ".join(dict.fromkeys(item.name for item in plan.disk))
    disk = (
        f"disk: {gigabytes(plan.disk_bytes)} GB of {saved}" if saved else "disk: nothing is saved"
    )
    if plan.free_disk is not None:
        disk += f", {gigabytes(plan.free_disk)} GB free"
    problems = [problem_text(problem) for problem in plan.problems]
    source = plan.band.source if sources else "which predictions may be off by"
    band = wrap_lines(f"band: {plan.band.share:.0%}, {source}", "      ")
    measured = [
        wrap_lines(f"calibrated: {', '.join(names)}, {source}", "      ")
        for source, names in plan.constants.calibrations().items()
    ]
    lines = [disk]
    if pace := pace_text(plan.job):
        lines.append(wrap_lines(pace, "      "))
    if unknown := [store.peak.bytes for store in plan.hosts if store.capacity is None]:
        lines.append(f"host memory: {gigabytes(max(unknown))} GB, not judged: give --host-memory")
    return "\n".join([*lines, band, *measured, *problems, f"verdict: {plan.verdict}"])


def problem_text(problem: Problem) -> str:
    """Return a problem as a block of lines."""
    return "\n".join(
        [
            wrap_lines(f"{problem.severity} {problem.code}: {problem.what}", "    "),
            wrap_lines(f"    {problem.why}", "    "),
            wrap_lines(f"    -> {problem.fix}", "       "),
        ]
    )


def _store_verdict(store: Store, plan: Plan) -> str:
    peak = store.peak
    words = f"peak {gigabytes(peak.bytes)} GB in {peak.moment}"
    if store.capacity is None:
        return f"{words}; capacity unknown"
    return f"{words}: {verdict_of(store, plan.band)}"


def _store_line(store: Store, plan: Plan) -> str:
    peak, room, verdict = store.peak, "", "capacity unknown"
    if store.capacity is not None:
        room, verdict = f" of {gigabytes(store.capacity)}", verdict_of(store, plan.band)
    words = f"peak {gigabytes(peak.bytes)}{room} GB in {peak.moment.phase}; {verdict}"
    return wrap_lines(f"{store.name}: {words}", "  ")


def wrap_lines(text: str, indent: str, width: int = WIDTH) -> str:
    """Wrap the text to `width` columns between words; begin lines after the first with `indent`."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def store_table(store: Store, most: int | None = None) -> str:
    """Return a table in GB: a row for each item, the largest first, and a column for each phase.

    A column shows the fullest instant of its phase. `most` limits the rows (None: all but small
    items); the items without a row are added up in one.
    """
    uses = store.phases
    phases = [use.moment.phase for use in uses]
    totals = {use.moment.phase: use.bytes for use in uses}
    label = min(44, WIDTH - _COLUMN * len(phases))
    head = "".join(f"{_short(phase):>{_COLUMN}}" for phase in phases)
    lines = [store.name, f"{'  GB, at its fullest':<{label}}{head}"]
    lines += [_line(name, sizes, phases, label) for name, sizes in _rows(store, most)]
    lines.append(" " * label + " ------" * len(phases))
    lines.append(_line("in all", totals, phases, label))
    if store.capacity is not None:
        capacity = dict.fromkeys(phases, store.capacity)
        lines.append(_line("load line", capacity, phases, label))
    return "\n".join(lines)


def _rows(store: Store, most: int | None) -> Iterable[_TableRow]:
    sizes: dict[str, dict[Phase, int]] = {}
    for use in store.phases:
        for item in use.items:
            name = item.name if item.role == "process" else f"{item.role} {item.name}"
            of_item = sizes.setdefault(name, {})
            of_item[use.moment.phase] = of_item.get(use.moment.phase, 0) + item.bytes
    least = _SMALL * store.peak.bytes
    large = {name: row for name, row in sizes.items() if max(row.values()) >= least}
    large = dict(sorted(large.items(), key=lambda row: -max(row[1].values()))[:most])
    yield from large.items()
    small = [row for name, row in sizes.items() if name not in large]
    if small:
        phases = dict.fromkeys(phase for row in small for phase in row)
        rest = {phase: sum(row.get(phase, 0) for row in small) for phase in phases}
        yield plural(len(small), "other item"), rest


def _line(name: str, sizes: Mapping[Phase, int], phases: Sequence[Phase], label: int) -> str:
    cells = [gigabytes(sizes[phase]) if sizes.get(phase) else "" for phase in phases]
    room = label - 2
    shortened = name if len(name) <= room else name[: room - 1] + "~"
    return (f"  {shortened:<{room}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()


def draw_bars(store: Store, *, unicode: bool) -> str:
    """Return a bar for each phase with a line at the capacity, and a legend, in 80 columns."""
    signs = dict(zip(KINDS, _UNICODE if unicode else _ASCII, strict=True))
    largest = max(store.peak.bytes, store.capacity or 0)
    limit = None if store.capacity is None else round(_BAR * store.capacity / largest)
    line = "│" if unicode else "|"
    bars = [_draw_bar(use, signs, largest, limit, line) for use in store.phases]
    used = {item.kind for use in store.phases for item in use.items}
    return "\n".join([store.name, *bars, *_legend([kind for kind in KINDS if kind in used], signs)])


def _draw_bar(use: Use, signs: dict[Kind, str], largest: int, limit: int | None, line: str) -> str:
    cells, filled, drawn = "", 0, 0
    for kind, size in use.stacks.items():
        filled += size
        width = round(_BAR * filled / largest)
        cells += signs[kind] * (width - drawn)
        drawn = width
    cells = f"{cells:<{_BAR}}"
    if limit is not None:
        cells = cells[:limit] + line + cells[limit:]
    phase = _short(use.moment.phase)
    return f"  {phase:<8}{cells}{gigabytes(use.bytes):>9}"


def _legend(kinds: list[Kind], signs: dict[Kind, str]) -> list[str]:
    entries = [f"{signs[kind]} {kind}" for kind in kinds]
    lines = ["         "]
    for entry in entries:
        if len(lines[-1]) + len(entry) > 76:
            lines.append("         ")
        lines[-1] += f" {entry} "
    return [line.rstrip() for line in lines]


def pace_text(job: PlannedJob) -> str:
    """Return a sentence with the least time of a step; "" without cards of known speed."""
    rate, work, sampler = tokens_at_peak(job), job.spec.workload, job.sampler
    if rate is None:
        return ""
    tokens = work.sequences * work.mini_batches * work.longest
    text = f"time: a step of {tokens:,} tokens, all sequences at full length, takes at least "
    text += f"{_seconds(tokens / rate)} of computing at the cards' bf16 peak, of which runs reach "
    text += "a part"
    cards = job.count_cards(lambda process: process.kind in ("engine", "engine worker"))
    if sampler is None or job.spec.sampling is None or not cards:
        return text
    longest = max(job.spec.sampling.longest_responses.values())
    read = longest * job.policy.active_parameters * sampler.element
    bandwidth = sum(n * card.memory_bandwidth for card, n in cards.items())
    bandwidth /= sampler.rollout.engines
    seconds = _seconds(read / bandwidth)
    return f"{text}; and {seconds} of sampling {longest:,} tokens, each of which reads the weights"


def _seconds(value: float) -> str:
    return duration_text(value) if value >= 60 else f"{value:.2g} s"


def tokens_at_peak(job: PlannedJob) -> float | None:
    """Return the tokens per second of a run if all its cards computed at their bf16 peak.

    Return None without cards, or if the speed of a card is unknown.

    A token takes 2 FLOPs per parameter in a forward pass, and in each of the two products of a
    backward pass (Kaplan et al. 2020, section 2.1). Recomputation and attention scores are left
    out. So for long sequences, the share of the peak that a run reaches is a lower bound.
    """
    cards = job.count_cards()
    if job.device != "cuda" or not cards or not all(known_card(card.name) for card in cards):
        return None
    return sum(n * card.bf16_flops for card, n in cards.items()) / token_flops(job)


def token_flops(job: PlannedJob) -> float:
    """Return the FLOPs per token of an optimizer step, summed for all roles and the engines.

    A role that learns needs as many FLOPs for the forward pass, for the gradients of inputs, and
    for the gradients of weights. A frozen base has no gradients of weights.
    """
    spec, products = job.spec, 0.0
    for name, trained in spec.trained.items():
        forwards = 3 if trained.adapter is None else 2
        work = spec.workload.epochs * forwards + spec.roles[name].scores
        products += job.shapes[name].active_parameters * work
    products += sum(job.shapes[name].active_parameters for name in spec.frozen)
    products += job.policy.active_parameters if job.sampler is not None else 0
    return 2 * products
