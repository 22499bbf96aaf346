"""The stores that a plan fills: cards, the host memory of nodes, and disks.

For each card and host: its use at every moment, the fullest moment, and whether its contents fit.
For each process: its planned peaks, which the ledger compares with the measured ones. For the disk:
the files that a run writes to its directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any, Literal

from plimsoll.memory.contents.contents import ContentsKey, PlannedJob, contents_key
from plimsoll.memory.contents.layout import EqualSlots, Process, Slot
from plimsoll.model.price.form import frozen_parameters, trained_parameters
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import PHASES, Phase, RunSpec
from plimsoll.run.readings import Footprint, Footprints
from plimsoll.timeline.items import KINDS, Allocation, Item, Kind, Level, Moment, Where
from plimsoll.trainer.price import trainer_price

Verdict = Literal["fits", "risky", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "risky", "does not fit")
"""All verdicts, from the best to the worst."""


@dataclass(frozen=True)
class Band:
    """The known error of predictions, as a share of the predicted bytes."""

    share: float
    source: str


@dataclass(frozen=True)
class Use:
    """Everything that is held at one moment; sizes are in bytes."""

    moment: Moment
    held: tuple[Item, ...]
    """The items of each process."""
    gap: float
    """The allocator's gap, as in `uses_of`."""

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The items, merged by role and name, and the allocator's gap; the largest first."""
        merged = merge(item for item in self.held if item.bytes)
        gap = [_gap_item(self.allocated, self.gap)] if self.gap and self.allocated else []
        return tuple(sorted([*merged, *gap], key=lambda item: -item.bytes))

    @property
    def stacks(self) -> dict[Kind, int]:
        """Bytes by kind, in the order of the kinds."""
        totals = dict.fromkeys(KINDS, 0)
        for item in self.items:
            totals[item.kind] += item.bytes
        return totals

    @cached_property
    def bytes(self) -> int:
        """The bytes that the device reports as used, or that the host's processes hold."""
        return sum(item.bytes for item in self.held) + self._gap_bytes

    @cached_property
    def allocated(self) -> int:
        """The bytes that torch counts as allocated."""
        return sum(item.bytes for item in self.held if item.level == "allocated")

    @property
    def reserved(self) -> int:
        """The bytes that torch counts as reserved: allocated ones, and the allocator's gap."""
        return self.allocated + self._gap_bytes

    @property
    def _gap_bytes(self) -> int:
        return round(self.gap * self.allocated)


def uses_of(held: Iterable[Allocation], gap: float = 0.0) -> tuple[Use, ...]:
    """Return what is held at each moment of these allocations, sorted by phase and instant.

    Args:
        held: the allocations.
        gap: bytes that the allocator reserves beyond the allocated bytes, as a share of these.
    """
    by_life: dict[frozenset[Moment], list[Item]] = {}
    for allocation in held:  # few different lifetimes among hundreds of items
        by_life.setdefault(allocation.moments, []).append(allocation.item)
    by_moment: dict[Moment, list[Item]] = {}
    for moments, items in by_life.items():
        for moment in moments:
            by_moment.setdefault(moment, []).extend(items)
    ordered = sorted(by_moment, key=lambda moment: (PHASES.index(moment.phase), moment.instant))
    return tuple(Use(moment, tuple(by_moment[moment]), gap) for moment in ordered)


def phase_peaks(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Return the fullest instant of each phase, in the order of the phases."""
    peaks: dict[Phase, Use] = {}
    for use in uses:
        best = peaks.get(use.moment.phase)
        if best is None or use.bytes > best.bytes:
            peaks[use.moment.phase] = use
    return tuple(peaks[phase] for phase in PHASES if phase in peaks)


def fullest(uses: Iterable[Use]) -> Use:
    """Return the use with the most bytes; if several have as many, the first of them."""
    return max(uses, key=lambda use: use.bytes)


def _gap_item(allocated: int, gap: float) -> Item:
    return Item(
        role="process",
        kind="processes",
        name="allocator gap",
        where="device",
        level="reserved",
        bytes=round(gap * allocated),
        formula=f"{gap:.0%} of {allocated:,} allocated bytes",
        source="constants: reserved over allocated bytes of PyTorch's caching allocator",
    )


def merge(items: Iterable[Item]) -> list[Item]:
    """Merge the items of all processes: return one item for each role, name and level."""
    groups: dict[tuple[str, str, Level], list[Item]] = {}
    for item in items:
        groups.setdefault((item.role, item.name, item.level), []).append(item)
    return [_add_up(group) for group in groups.values()]


def _add_up(items: Sequence[Item]) -> Item:
    if len(items) == 1:
        return items[0]
    counts = Counter(item.formula for item in items)
    formula = " + ".join(f"{n} x ({f})" if n > 1 else f"({f})" for f, n in counts.items())
    return replace(items[0], bytes=sum(item.bytes for item in items), formula=formula)


@dataclass(frozen=True)
class Store:
    """A card, or a node's host memory; equal ones are one store with several slots."""

    where: Literal["device", "host"]
    equal: tuple[EqualSlots, ...]
    """The cards or hosts, by kinds of nodes."""
    hardware: str
    """The name of the hardware, such as A100-80GB."""
    capacity: int | None
    """Usable bytes; None if unknown."""
    held: tuple[Allocation, ...]
    """Everything that its processes hold there at any moment."""
    gap: float
    """The allocator's gap, as in `uses_of`."""

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The use at every moment."""
        return uses_of(self.held, self.gap)

    @cached_property
    def phases(self) -> tuple[Use, ...]:
        """The fullest instant of each phase."""
        return phase_peaks(self.uses)

    @property
    def peak(self) -> Use:
        """The fullest instant of all."""
        return fullest(self.uses)

    @property
    def count(self) -> int:
        """The number of these cards or hosts."""
        return sum(len(nodes) for nodes, _ in self.equal)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Each of these cards or hosts, in order."""
        return tuple(sorted(Slot(node, card) for nodes, card in self.equal for node in nodes))

    @property
    def places(self) -> str:
        """These cards or hosts in words, such as `node 0, cards 0-7` or `nodes 0-3`."""
        numbers = sorted({node for nodes, _ in self.equal for node in nodes})
        cards = sorted({card for _, card in self.equal if card is not None})
        text = f"node{'s' * (len(numbers) > 1)} {_ranges(numbers)}"
        return f"{text}, card{'s' * (len(cards) > 1)} {_ranges(cards)}" if cards else text

    @property
    def place(self) -> str:
        """The word for such a store: "node" or "card"."""
        return "node" if self.where == "host" else "card"

    @property
    def name(self) -> str:
        """The name for display, such as `8 x A100-80GB (node 0, cards 0-7)`."""
        count = f"{self.count} x " if self.count > 1 or self.where == "device" else ""
        return f"{count}{self.hardware} ({self.places})"

    @property
    def without_engines(self) -> Store:
        """The store without the items of the rollout engines."""
        return self.without(lambda item: item.role == "rollout")

    def without(self, unwanted: Callable[[Item], bool]) -> Store:
        """Return the store without the unwanted items."""
        return replace(self, held=tuple(a for a in self.held if not unwanted(a.item)))


def verdict_of(store: Store, band: Band) -> Verdict:
    """Return whether a store holds its peak: it fits, is risky, or does not fit.

    A peak above the capacity does not fit. It is risky if the peak plus the error band is above the
    capacity. vLLM's share of a card is set, not predicted, so it gets no band. A host of
    unknown memory always fits.
    """
    peak = store.peak
    if store.capacity is None:
        return "fits"
    if peak.bytes > store.capacity:
        return "does not fit"
    return "risky" if likely_worst(peak, band) > store.capacity else "fits"


def likely_worst(use: Use, band: Band) -> float:
    """Return the bytes of a use if all its predictions are too low by the error band."""
    exact = sum(item.bytes for item in use.held if item.role == "rollout")
    return use.bytes + band.share * (use.bytes - exact)


def _ranges(numbers: Sequence[int]) -> str:
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def process_peaks(job: PlannedJob) -> dict[str, Footprints]:
    """Return a dict from process (by its name in the ledger) and phase to the planned peaks.

    Each number is the largest of all instants of the phase. The front and the workers of an engine
    are one process: host bytes are summed, and the fullest card counts. `device` includes other
    processes on the card. `eval` repeats the phase that does the same work: sampling, or else
    scoring. Ray's own processes are left out, because they are not measured.
    """
    read = [process for process in job.layout.processes if process.kind != "ray"]
    keys = {process: contents_key(job, process) for process in read}
    on_card: dict[Slot, tuple[ContentsKey, ...]] = {}
    for process in read:
        if process.slot.card is not None:
            on_card[process.slot] = (*on_card.get(process.slot, ()), keys[process])
    peaks = cache(partial(_phases, job))
    return {
        name: _with_eval(_combine([peaks(keys[p], on_card.get(p.slot, ())) for p in processes]))
        for name, processes in groupby(read, key=reading_name)
    }


def reading_name(process: Process) -> str:
    """Return the name of a process in the ledger's readings; a worker has its engine's name."""
    return f"engine {process.index}" if process.kind == "engine worker" else process.name


def _phases(job: PlannedJob, key: ContentsKey, sharing: Sequence[ContentsKey]) -> Footprints:
    """Return the planned peaks of a process; `sharing` are the processes on its card, if any."""
    contents = job.contents[key]
    host = _by_phase(contents, "host")
    if not sharing:
        return {phase: Footprint(_most(uses)) for phase, uses in host.items()}
    gap = job.constants.allocator_gap
    on_card = [held for shared in sharing for held in job.contents[shared]]
    device, card = _by_phase(contents, "device", gap), _by_phase(on_card, "device", gap)
    return {
        phase: Footprint(
            host=_most(uses),
            allocated=max((use.allocated for use in device.get(phase, ())), default=0),
            reserved=max((use.reserved for use in device.get(phase, ())), default=0),
            device=_most(card.get(phase, ())),
        )
        for phase, uses in host.items()
    }


def _by_phase(held: Iterable[Allocation], where: Where, gap: float = 0.0) -> dict[Phase, list[Use]]:
    uses: dict[Phase, list[Use]] = {}
    for use in uses_of((a for a in held if a.item.where == where), gap):
        uses.setdefault(use.moment.phase, []).append(use)
    return uses


def _most(uses: Iterable[Use]) -> int:
    return max((use.bytes for use in uses), default=0)


def _combine(parts: list[Footprints]) -> Footprints:
    """Return the footprints of several processes together: host bytes summed, the fullest card."""
    if len(parts) == 1:
        return parts[0]
    return {
        phase: replace(
            max((part[phase] for part in parts), key=lambda footprint: footprint.device or 0),
            host=sum(part[phase].host for part in parts),
        )
        for phase in parts[0]
    }


def _with_eval(phases: Mapping[str, Footprint]) -> Footprints:
    same = next((phase for phase in ("rollout", "score") if phase in phases), None)
    return dict(phases) | ({} if same is None else {"eval": phases[same]})


_STORED_LOGPROB = 20


def disk_items(job: PlannedJob) -> tuple[Item, ...]:
    """Return the most that a run keeps on disk.

    These are the kept checkpoints, the best checkpoint, the checkpoint that is being written, and
    the final model.
    """
    roles, run = job.spec.trained, job.spec.run
    if not roles:
        return ()
    count = run.keep_checkpoints and run.keep_checkpoints + 1 + (run.best is not None)
    sender = job.spec.sender
    element, parameters = sender.model.element, _parameters(job, sender.name)
    parameters += frozen_parameters(job.spec.trained[sender.name], job.shapes[sender.name])
    words = f"{element} bytes x {parameters:,} parameters"
    model = _item(sender.name, "final model", element * parameters, words)
    checkpoints = [_checkpoints(job, name, count) for name in roles]
    written = [*checkpoints * (count > 0), *[model] * run.save_model]
    return (*written, *_reference_logprobs(job.spec))


def checkpoint_bytes(job: PlannedJob) -> int:
    """Return the bytes of one checkpoint of all trained roles."""
    return sum(_checkpoints(job, name, 1).bytes for name in job.spec.trained)


def _parameters(job: PlannedJob, name: RoleName) -> int:
    """Return the number of trained parameters of a role that learns."""
    role, shape = job.spec.trained[name], job.shapes[name]
    return trained_parameters(role, shape, job.spec.roles[name].head)


def _reference_logprobs(spec: RunSpec[Any]) -> Iterator[Item]:
    """Yield an item with the most bytes that the stored log-probs of an early role take.

    Rows that come several times are counted each time. KTO scores each prompt with two responses.
    Nothing is yielded for a run in epochs: its steps are unknown before its rows are read.
    """
    steps, work = spec.known_steps, spec.workload
    role = next((role for role in spec.roles.values() if role.early), None)
    if role is not None and steps is not None:
        rows = work.scored_with * steps * work.sequences
        yield Item(
            role.name,
            "frozen models",
            "log-probs",
            "disk",
            "allocated",
            _STORED_LOGPROB * rows,
            f"{_STORED_LOGPROB} bytes x {rows:,} sequences of {steps:,} steps",
            "run/stored_logprobs.py: a hash of 16 bytes and a float32",
        )


def _checkpoints(job: PlannedJob, name: RoleName, count: int) -> Item:
    """Return the item of a role's checkpoints: masters, moments, and a moving average.

    The weights are not saved, because they are the rounded masters.
    """
    role, parameters = job.spec.trained[name], _parameters(job, name)
    saved = trainer_price(role).saved(role)
    return _item(
        name,
        "checkpoints",
        count * (saved.masters + saved.moments + saved.average) * parameters,
        f"{count} checkpoints (one of them being written) x ({saved.masters} masters + "
        f"{saved.moments} moments + {saved.average} moving average) bytes x {parameters:,} "
        "trained parameters",
    )


def _item(role: str, name: str, size: int, formula: str) -> Item:
    source = "trainer/checkpoint.py; trainer/export.py"
    return Item(role, "weights", name, "disk", "allocated", size, formula, source)
