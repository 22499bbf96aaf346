"""Specs and plans of configs that tests give as text."""

from __future__ import annotations

from typing import Any

from plimsoll.config.load import validate
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.contents.stores import Use
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.items import Moment


def read_config(job: str, text: str) -> JobConfig:
    config: JobConfig = validate(JOBS[job].config, read_tree(text, f"{job}.yaml"))
    return config


def read_spec(job: str, text: str) -> RunSpec[Any]:
    return spec_of(read_config(job, text))


def plan(job: str, text: str, cluster: str, nodes: int = 1, host: int = 10**12) -> Plan:
    """Return the plan on a cluster, which the config is given as its hardware too."""
    read = read_config(job, text)
    there = read.cluster.model_copy(update={"hardware": cluster})
    spec = spec_of(read.model_copy(update={"cluster": there}))
    return make_plan(spec, Ground(parse_cluster(cluster, nodes, host)))


def sizes(found: Plan, phase: str) -> dict[str, int]:
    """On the first kind of card, at the phase's peak, by role and item."""
    use = next(use for use in found.devices[0].phases if use.moment.phase == phase)
    return _named(use)


def sizes_at(found: Plan, moment: Moment) -> dict[str, int]:
    """Return the `sizes` at a moment."""
    return _named(next(use for use in found.devices[0].uses if use.moment == moment))


def _named(use: Use) -> dict[str, int]:
    return {f"{item.role} {item.name}": item.bytes for item in use.items}
