"""The plan of a run: its memory on all machines, its problems, and the ways out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.memory.levers.ways_out import with_ways_out
from plimsoll.memory.rules.shortages import find_close
from plimsoll.memory.weigh import Ground, Plan, problems_besides, weigh
from plimsoll.spec.run_spec import RunSpec


def make_plan(spec: RunSpec[Any], ground: Ground) -> Plan:
    """Return the plan of a run, with ways out if something does not fit. Raises as `weigh`."""
    plan = weigh(spec, ground)
    close = find_close(plan.stores, plan.band)
    problems = (*problems_besides(plan), *with_ways_out(plan, ground), *close)
    return replace(plan, problems=problems)
