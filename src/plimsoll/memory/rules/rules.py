"""The rules of a plan besides memory.

They are about settings that cannot work on this hardware, with these models, or on this machine.
docs/rules.md lists their codes.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem, find
from plimsoll.machine.local_host import LocalHost
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.memory.rules import models, ranks
from plimsoll.resolve.rules.machine import local_host_rules

PLAN_RULES = (
    *(models.positions, models.other_parts, models.vocabularies, models.adapter_targets),
    *(models.varlen, ranks.engines),
    *(ranks.bfloat16_cards, ranks.own_kernels, ranks.offload),
    *(ranks.idle_ranks, ranks.idle_cards, ranks.nodes, ranks.trainers),
    ranks.rank_sleep,
)


def find_conflicts(job: PlannedJob, host: LocalHost | None) -> Iterator[Problem]:
    """Yield the problems that the rules find; `host` is None for a plan of other machines."""
    yield from find(PLAN_RULES, job)
    if host is not None:
        yield from ranks.engines_here(job, host.free_bytes)
        yield from local_host_rules(job.spec, host)
        if job.spec.cluster.address is None:  # other machines of a cluster cannot be checked here
            yield from ranks.triton(job)
