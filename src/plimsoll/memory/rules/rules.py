"""The rules that a plan is held against besides bytes: settings that cannot work on this hardware,
with these models, on the machine at hand. docs/rules.md lists their codes.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem, find
from plimsoll.machine.local_host import LocalHost
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.rules.engines import (
    cpu_heads,
    divided,
    engine_dtype,
    free_share,
    not_counted,
    one_node,
)
from plimsoll.memory.rules.models import (
    adapter_targets,
    other_parts,
    positions,
    varlen,
    vocabularies,
)
from plimsoll.memory.rules.ranks import card_rules, lost_updates, zero_plus_plus
from plimsoll.spec.rules.machine import local_host_rules

PLAN_RULES = (
    positions,
    other_parts,
    vocabularies,
    adapter_targets,
    varlen,
    divided,
    one_node,
    engine_dtype,
    cpu_heads,
    not_counted,
    card_rules,
    lost_updates,
    zero_plus_plus,
)


def find_conflicts(job: Job, host: LocalHost | None) -> Iterator[Problem]:
    """here: None for a plan of other machines."""
    yield from find(PLAN_RULES, job)
    if host is not None:
        yield from free_share(job, host.free_bytes)
        yield from local_host_rules(job.spec, host)
