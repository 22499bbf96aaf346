"""The plan of a run's memory, and whether it fits: what lacks memory, disk or cards, and why.

The plan has every byte by role, phase and item, on all cards, hosts and disks. The top consumer of
an overfull store is the group of items without which the rest would fit. Levers give the ways out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from plimsoll.config.problems import Code, Problem
from plimsoll.config.run import RunConfig
from plimsoll.machine.hardware import Hardware
from plimsoll.machine.local_host import LocalHost
from plimsoll.memory.contents.contents import ContentsKey, PlannedJob, contents_key, make_job
from plimsoll.memory.contents.layout import EqualSlots
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import VERDICTS, Band, Store, Verdict, disk_items, verdict_of
from plimsoll.memory.rules import find_conflicts
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.run.numbers import first_of, gigabytes, plural
from plimsoll.sampler.price import CrowdedCard, rollout_price
from plimsoll.timeline.items import Item, Kind, Where

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
        """Return this ground with `cluster.nodes` machines."""
        return replace(self, hardware=replace(self.hardware, nodes=spec.cluster.nodes))


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
        if any(problem.severity == "error" for problem in self.problems):
            return "does not fit"
        return max((verdict_of(s, self.band) for s in self.stores), key=VERDICTS.index)


def weigh(spec: RunSpec[Any], ground: Ground) -> Plan:
    """Return the plan of a run; overfull cards and hosts are not yet among its problems.

    The shape of a model is read from its config.json, or is a shipped one. No weights are read.

    Raises ConfigError if the shape of a model is unknown.
    """
    job = make_job(spec, ground.hardware, ground.constants)
    devices = tuple(_stores(job, "device"))
    hosts = tuple(_stores(job, "host"))
    disk = disk_items(job)
    missing = find_missing(job, disk, ground.free_disk)
    unstarted = tuple(map(Shortage, (*_cards(job), *_engines(job))))
    conflicts = (*find_conflicts(job, ground.host), *missing)
    problems = (*conflicts, *(shortage.problem for shortage in unstarted))
    return Plan(job, ground.band, devices, hosts, disk, ground.free_disk, unstarted, problems)


def shortages_of(plan: Plan) -> tuple[Shortage, ...]:
    """Return the shortages of a weighed plan.

    The reasons take as long to compute as the plan itself.
    """
    overfull = [s for s in plan.stores if verdict_of(s, plan.band) == "does not fit"]
    return (*plan.unstarted, *(_find_shortage(plan.job, store) for store in overfull))


def has_shortage(plan: Plan) -> bool:
    """Return whether a weighed plan has any shortage, without computing the reasons."""
    overfull = any(verdict_of(store, plan.band) == "does not fit" for store in plan.stores)
    return overfull or bool(plan.unstarted)


def problems_besides(plan: Plan) -> tuple[Problem, ...]:
    """Return the problems of a weighed plan that are not shortages."""
    codes = {shortage.problem.code for shortage in plan.unstarted}
    return tuple(problem for problem in plan.problems if problem.code not in codes)


def _stores(job: PlannedJob, where: Literal["device", "host"]) -> Iterator[Store]:
    """Yield a store for each group of cards (or hosts) with the same hardware and contents."""
    slots_of: dict[object, list[EqualSlots]] = {}
    keys_of: dict[object, list[ContentsKey]] = {}
    for kind in job.layout.kinds:
        by_card: dict[int | None, list[ContentsKey]] = {}
        for process in kind.processes:
            card = process.slot.card if where == "device" else None
            if where == "host" or card is not None:
                by_card.setdefault(card, []).append(contents_key(job, process))
        for card, keys in sorted(by_card.items(), key=lambda item: item[0] or 0):
            # The first rank also collects and sends weights. On cards it stands for the others.
            compared = keys if where == "host" else [replace(key, first=False) for key in keys]
            group = (*_hardware(job, card), *compared)
            slots_of.setdefault(group, []).append((kind.nodes, card))
            keys_of.setdefault(group, keys)
    for equal, slots in slots_of.items():
        name, capacity = _hardware(job, slots[0][1])
        contents = (job.contents[key] for key in keys_of[equal])
        held = tuple(a for allocations in contents for a in allocations if a.item.where == where)
        gap = job.constants.allocator_gap if where == "device" else 0.0
        yield Store(where, tuple(slots), name, capacity, held, gap)


def _hardware(job: PlannedJob, card: int | None) -> tuple[str, int | None]:
    """Return the name of a card, or of the host, and the bytes that it can hold."""
    if card is None:
        return "host memory", job.hardware.node.host_bytes
    return job.hardware.node.cards[card].name, job.hardware.node.cards[card].usable_bytes


@dataclass(frozen=True)
class _TopConsumer:
    """The items of a role at a peak, all or of one kind, the largest first."""

    role: RoleName
    """The owner of the items."""
    kind: Kind | None
    """Their kind; None for all that a role has."""
    where: Where
    """The side that is too small for them."""
    phase: Phase
    """The phase of the peak."""
    items: tuple[Item, ...]
    alone: bool
    """Whether the rest fits without them."""

    @property
    def bytes(self) -> int:
        """The bytes of all these items."""
        return sum(item.bytes for item in self.items)

    @property
    def what(self) -> str:
        """The items in words."""
        match self.kind:
            case None:
                return f"all of the {self.role}"
            case "frozen models":
                return f"the {self.role} model"
            case "rollout engines" | "processes":
                return f"the {self.kind}"
            case _:
                return f"the {self.role}'s {self.kind}"


_OPTIONAL: tuple[Kind | None, ...] = (
    "frozen models",
    "activations",
    "rollout engines",
    "optimizer states",
    "gradients",
    "buffers",
    "weights",
    "processes",
    None,
)
"""The kinds, the most optional first; None for everything of a role."""


def find_top_consumer(store: Store, spec: RunSpec[Any]) -> _TopConsumer:
    """Return the group of items that makes a store overfull.

    Of the groups without which the rest fits, this is the most optional kind's largest group. If
    there is no such group, it is the largest group of a role and kind.
    """
    groups = dict.fromkeys((item.role, item.kind) for item in store.peak.items)
    kinds = [_consumer(store, role, kind) for role, kind in groups]
    kinds.sort(key=lambda consumer: -consumer.bytes)
    # Everything of one of several trained roles could go to other machines; the last comes first.
    names = [*spec.trained]
    parted = reversed(names) if len(names) > 1 else ()
    roles = [_consumer(store, role, None) for role in parted]
    alone = [consumer for consumer in [*kinds, *roles] if consumer.alone]
    return min(alone, key=lambda top: _OPTIONAL.index(top.kind)) if alone else kinds[0]


def _consumer(store: Store, role: RoleName, kind: Kind | None) -> _TopConsumer:
    assert store.capacity is not None

    def is_chosen(item: Item) -> bool:
        return item.role == role and kind in (None, item.kind)

    alone = store.without(is_chosen).peak.bytes <= store.capacity
    items = tuple(item for item in store.peak.items if is_chosen(item))
    return _TopConsumer(role, kind, store.where, store.peak.moment.phase, items, alone)


@dataclass(frozen=True)
class Shortage:
    """A lack of memory or of cards."""

    problem: Problem
    """The error, without its fix."""
    top: _TopConsumer | None = None
    """The items that make a card or host overfull; None for processes that cannot start."""


_TOO_SMALL: Mapping[str, Code] = {"device": "device-memory", "host": "host-memory"}


def find_missing(job: PlannedJob, disk: Sequence[Item], free_disk: int | None) -> Iterator[Problem]:
    """Yield an error if CUDA is set but there is no card, and one if the disk is too small.

    Args:
        job: the run.
        disk: the files that the run writes.
        free_disk: free bytes of the disk; None if unknown.
    """
    if job.spec.cluster.device == "cuda" and job.hardware.cards == 0:
        yield Problem(
            "no-gpu",
            "error",
            "cluster.device is cuda, and the hardware has no GPU",
            "nothing can be put on a card that is not there",
            "cluster.device: cpu, or cluster.hardware: the cards that the run will have",
        )
    needed = sum(item.bytes for item in disk)
    if free_disk is not None and needed > free_disk:
        yield Problem(
            "disk-space",
            "error",
            f"what the run saves takes {gigabytes(needed)} GB of disk, and {gigabytes(free_disk)} "
            "GB are free",
            "; ".join(f"{item.role} {item.name}: {item.formula}" for item in disk),
            ", or ".join([*_saving_less(job.spec.run), "a run.directory on a larger disk"]),
        )


def _find_shortage(job: PlannedJob, store: Store) -> Shortage:
    """Return the shortage of a card or host that does not hold its peak."""
    top = find_top_consumer(store, job.spec)
    shared = _beside_ranks(job, store) if top.kind == "rollout engines" else None
    return Shortage(shared) if shared else Shortage(_overfull(store, top), top)


def find_close(stores: Sequence[Store], band: Band) -> Iterator[Problem]:
    """Yield a warning for each card and host that may not hold its peak."""
    for store in stores:
        if verdict_of(store, band) == "risky":
            assert store.capacity is not None
            peak = store.peak
            largest = ", ".join(f"{i.role} {i.name} {gigabytes(i.bytes)}" for i in peak.items[:3])
            yield Problem(
                _TOO_SMALL[store.where],
                "warning",
                f"{store.name} would hold {gigabytes(peak.bytes)} of {gigabytes(store.capacity)} "
                f"GB in {peak.moment}: closer than the plan is exact",
                f"predictions may be {band.share:.0%} too low; the largest items are {largest}",
                "try it with a short run, or make room as for what does not fit",
            )


def _cards(job: PlannedJob) -> Iterator[Problem]:
    layout, sampled = job.layout, job.sampler is not None
    if layout.unplaced:
        yield Problem(
            "more-ranks-than-gpus",
            "error",
            f"the run needs {plural(layout.cards_needed, 'GPU')} and the hardware has "
            f"{job.hardware.cards}: no card is left for {first_of(layout.unplaced, 4)}",
            "every rank has a card of its own"
            + ", and so has every part of an engine unless rollout.placement is shared, which "
            "needs rollout.staleness: 0; the parts of an engine are on one node" * sampled,
        )


def _engines(job: PlannedJob) -> Iterator[Problem]:
    """Yield the errors of engines that would not start, or would not hold one sequence."""
    site = job.engine_site
    if site is None:
        return
    cards = job.count_cards(lambda process: process.kind == "engine worker")
    sizes = [card.usable_bytes for card in cards]
    if sizes or job.device == "cpu":
        yield from rollout_price(site.sampler.rollout).starts(site, min(sizes, default=None))


def _beside_ranks(job: PlannedJob, store: Store) -> Problem | None:
    """Return the error of a card that would hold an engine or the ranks, but not both.

    None if the card is too full for another reason.
    """
    site, ranks = job.engine_site, store.without_engines
    if site is None or store.where != "device" or store.capacity is None:
        return None
    rollout = site.sampler.rollout
    together = rollout.placement == "shared" and bool(ranks.held)
    if not together or ranks.peak.bytes > store.capacity:
        return None
    peak = store.peak
    beside = sum(item.bytes for item in peak.items if item.role != "rollout")
    card = CrowdedCard(store.name, store.capacity, peak.moment, peak.bytes, beside)
    return next(rollout_price(rollout).shares(site, card), None)


def _saving_less(run: RunConfig) -> Iterator[str]:
    """Yield the settings with which a run writes less."""
    if run.keep_checkpoints > 1:
        yield "fewer run.keep_checkpoints"
    none = "run.keep_checkpoints: 0" + " without run.best" * (run.best is not None)
    keys = [none] * bool(run.keep_checkpoints) + ["run.save_model: false"] * run.save_model
    if keys:
        yield f"{' and '.join(keys)} (a trial that saves nothing)"


def _overfull(store: Store, top: _TopConsumer) -> Problem:
    assert store.capacity is not None
    peak = store.peak
    over = gigabytes(peak.bytes - store.capacity)
    share = gigabytes(top.bytes)
    alone = "without them the rest fits" if top.alone else "the largest, and not alone in it"
    items = ", ".join(f"{item.name} {gigabytes(item.bytes)}" for item in top.items[:4])
    return Problem(
        _TOO_SMALL[store.where],
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment}, {over} GB more than "
        "it has",
        f"it breaks on {top.what}, {share} GB ({items}): {alone}",
    )
