"""The plan of a run's memory, and whether it fits.

The plan has every byte by role, phase and item, on all cards, hosts and disks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from plimsoll.config.problems import Problem
from plimsoll.machine.hardware import Hardware
from plimsoll.machine.local_host import LocalHost
from plimsoll.memory.contents.contents import (
    ContentsKey,
    PlannedJob,
    contents_key,
    contents_of,
    make_job,
)
from plimsoll.memory.contents.layout import Process, Slot
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import VERDICTS, Band, Store, Verdict, disk_items, verdict_of
from plimsoll.memory.rules import find_conflicts
from plimsoll.memory.shortages import (
    Shortage,
    find_missing,
    find_overfull,
    find_unstarted,
)
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.items import Allocation, Item

BAND = Band(
    0.10,
    "published GPU peaks of two projects were at most 9.8 % above what was predicted (median of "
    "the errors 4.1 %), processes on CPU at most 9.3 %; peaks of projects whose settings are less "
    "known were further off",
)


@dataclass(frozen=True)
class Ground:
    """The machines that a plan is made for, and the facts known about them."""

    hardware: Hardware
    constants: Constants = field(default_factory=Constants)
    free_disk: int | None = None
    """Bytes free where the run directory will be; None if unknown."""
    host: LocalHost | None = None
    """Machine that the run would start on; None for other machines."""
    band: Band = BAND
    """The possible error of predictions."""

    def under(self, spec: RunSpec[Any]) -> Ground:
        """Return this ground with `cluster.nodes` machines, all like its first one."""
        nodes = self.hardware.nodes[:1] * spec.cluster.nodes
        return replace(self, hardware=replace(self.hardware, nodes=nodes))


@dataclass(frozen=True)
class Plan:
    """The memory of a run on its machines, and whether it fits."""

    job: PlannedJob
    band: Band
    devices: tuple[Store, ...]
    """Cards; equal ones are one store."""
    hosts: tuple[Store, ...]
    """Hosts; equal ones are one store."""
    disk: tuple[Item, ...]
    """The files in the run directory when it holds the most."""
    free_disk: int | None
    """Free bytes of the disk; None if unknown."""
    unstarted: tuple[Shortage, ...]
    """The shortages that keep the run from starting, such as too few cards."""
    problems: tuple[Problem, ...]

    @property
    def constants(self) -> Constants:
        """The constants that the plan was made with."""
        return self.job.constants

    @property
    def stores(self) -> tuple[Store, ...]:
        """The cards and the hosts."""
        return (*self.devices, *self.hosts)

    @property
    def disk_bytes(self) -> int:
        """The bytes of all files that are written."""
        return sum(item.bytes for item in self.disk)

    @cached_property
    def verdict(self) -> Verdict:
        """The worst verdict of all cards, hosts and problems."""
        return _worst(self.stores, self.band, self.problems)


def _worst(stores: Sequence[Store], band: Band, problems: Sequence[Problem]) -> Verdict:
    verdicts: list[Verdict] = [verdict_of(store, band) for store in stores]
    if any(problem.severity == "error" for problem in problems):
        verdicts.append("does not fit")
    return max(verdicts, key=VERDICTS.index)


def weigh(spec: RunSpec[Any], ground: Ground) -> Plan:
    """Return the plan of a run; overfull cards and hosts are not yet among its problems.

    The shape of a model is read from its config.json, or is a shipped one. No weights are read.

    Raises ConfigError if the shape of a model is unknown.
    """
    job = make_job(spec, ground.hardware, ground.constants)
    examples = {contents_key(job, process): process for process in job.layout.processes}
    contents = {key: contents_of(job, process) for key, process in examples.items()}
    devices = tuple(_stores(job, contents, "device"))
    hosts = tuple(_stores(job, contents, "host"))
    disk = disk_items(job)
    missing = find_missing(job, disk, ground.free_disk)
    unstarted = tuple(find_unstarted(job))
    conflicts = (*find_conflicts(job, ground.host), *missing)
    problems = (*conflicts, *(shortage.problem for shortage in unstarted))
    return Plan(job, ground.band, devices, hosts, disk, ground.free_disk, unstarted, problems)


def shortages_of(plan: Plan) -> tuple[Shortage, ...]:
    """Return the shortages of a weighed plan.

    The reasons take as long to compute as the plan itself.
    """
    overfull = find_overfull(plan.job, plan.stores, plan.band)
    return (*plan.unstarted, *overfull)


def has_shortage(plan: Plan) -> bool:
    """Return whether a weighed plan has any shortage, without computing the reasons."""
    overfull = any(verdict_of(store, plan.band) == "does not fit" for store in plan.stores)
    return overfull or bool(plan.unstarted)


def problems_besides(plan: Plan) -> tuple[Problem, ...]:
    """Return the problems of a weighed plan that are not shortages."""
    codes = {shortage.problem.code for shortage in plan.unstarted}
    return tuple(problem for problem in plan.problems if problem.code not in codes)


def _stores(
    job: PlannedJob,
    contents: Mapping[ContentsKey, tuple[Allocation, ...]],
    where: Literal["device", "host"],
) -> Iterator[Store]:
    """Yield a store for each group of cards (or hosts) with the same hardware and contents."""
    slots_of: dict[object, list[Slot]] = {}
    keys_of: dict[object, list[ContentsKey]] = {}
    for slot, processes in sorted(_by_slot(job.layout.processes, where).items()):
        keys = [contents_key(job, process) for process in processes]
        # The first rank also collects and sends weights. On cards it stands for the other ranks.
        compared = keys if where == "host" else [replace(key, first=False) for key in keys]
        group = (_hardware(job, slot), *compared)
        slots_of.setdefault(group, []).append(slot)
        keys_of.setdefault(group, keys)
    for equal, slots in slots_of.items():
        name, capacity = _hardware(job, slots[0])
        held = tuple(a for key in keys_of[equal] for a in contents[key] if a.item.where == where)
        gap = job.constants.allocator_gap if where == "device" else 0.0
        yield Store(where, tuple(slots), name, capacity, held, gap)


def _by_slot(processes: Sequence[Process], where: str) -> dict[Slot, list[Process]]:
    by_slot: dict[Slot, list[Process]] = {}
    for process in processes:
        slot = process.slot if where == "device" else Slot(process.slot.node)
        if where == "host" or slot.card is not None:
            by_slot.setdefault(slot, []).append(process)
    return by_slot


def _hardware(job: PlannedJob, slot: Slot) -> tuple[str, int | None]:
    """Return the name of a slot's hardware, and the bytes that it can hold."""
    node = job.hardware.nodes[slot.node]
    if slot.card is None:
        return "host memory", node.host_bytes
    return node.cards[slot.card].name, node.cards[slot.card].usable_bytes
