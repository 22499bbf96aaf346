"""A plan for a person to read: tables, bars, verdict, problems; 80 columns."""

from __future__ import annotations

import textwrap

from plimsoll.config.problems import Problem
from plimsoll.memory.contents.stores import Store, judge
from plimsoll.memory.plan.drawing import draw_bars
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.plan.table import WIDTH, store_table
from plimsoll.run.counting import gigabytes


def plan_text(plan: Plan, *, unicode: bool) -> str:
    """Everything: a table and bars for each kind of card and host, and what comes of it."""
    stores = [*plan.devices, *plan.hosts]
    parts = [f"{store_table(store)}\n{_store_verdict(store, plan)}" for store in stores]
    parts += [draw_bars(store, unicode=unicode) for store in stores]
    return "\n\n".join([*parts, verdict_text(plan)])


def verdict_text(plan: Plan) -> str:
    """The disk, the problems and the verdict."""
    disk = f"disk: {gigabytes(plan.disk_bytes)} GB of checkpoints and model"
    if plan.free_disk is not None:
        disk += f", {gigabytes(plan.free_disk)} GB free"
    problems = [problem_text(problem) for problem in plan.problems]
    band = _wrap(f"band: {plan.band.share:.0%}, {plan.band.source}", "      ")
    measured = [
        _wrap(f"calibrated: {', '.join(names)}, {source}", "      ")
        for source, names in plan.constants.calibrations().items()
    ]
    lines = [disk, *_not_judged(plan), band, *measured, *problems]
    return "\n".join([*lines, f"verdict: {plan.verdict}"])


def _not_judged(plan: Plan) -> list[str]:
    """Hosts of unknown memory, which no verdict is about."""
    needs = [store.peak.bytes for store in plan.hosts if store.capacity is None]
    if not needs:
        return []
    return [f"host memory: {gigabytes(max(needs))} GB, not judged: give --host-memory"]


def problem_text(problem: Problem) -> str:
    """One problem, as a block."""
    return "\n".join(
        [
            _wrap(f"{problem.severity} {problem.code}: {problem.what}", "    "),
            _wrap(f"    {problem.why}", "    "),
            _wrap(f"    -> {problem.fix}", "       "),
        ]
    )


def _store_verdict(store: Store, plan: Plan) -> str:
    peak = store.peak
    words = f"peak {gigabytes(peak.bytes)} GB in {peak.moment.phase} ({peak.moment.instant})"
    if store.capacity is None:
        return f"  {words}; capacity unknown"
    return f"  {words}: {judge(store, plan.band)}"


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
