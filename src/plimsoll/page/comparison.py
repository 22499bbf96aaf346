"""The ledger in short: predicted beside measured, by process and phase, over all steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Literal, get_args

from plimsoll.run.ledger import LedgerRow, group_rows, is_node
from plimsoll.run.readings import largest

Measure = Literal["host", "allocated", "reserved", "device"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class Comparison:
    """One number of one process in one phase; bytes, the largest of all steps.

    predicted: None where the plan says nothing. seconds: of all steps.
    """

    process: str
    phase: str
    measure: Measure
    predicted: int | None
    measured: int
    seconds: float

    @property
    def over(self) -> float | None:
        """The share by which measured exceeds predicted; negative where it is less."""
        return None if not self.predicted else self.measured / self.predicted - 1


def compare(rows: Iterable[LedgerRow]) -> list[Comparison]:
    """In the order in which processes and phases first came; nodes last."""
    return [
        comparison
        for own in group_rows(sorted(rows, key=is_node), lambda row: row.process).values()
        for together in group_rows(own, lambda row: row.phase).values()
        for comparison in _comparisons(together)
    ]


def _comparisons(rows: Sequence[LedgerRow]) -> Iterable[Comparison]:
    measured, last = reduce(largest, [row.measured for row in rows]), rows[-1]
    seconds = sum(row.seconds for row in rows)
    for measure in MEASURES:
        size = getattr(measured, measure)
        if size is not None:
            predicted = None if last.predicted is None else getattr(last.predicted, measure)
            yield Comparison(last.process, last.phase, measure, predicted, size, seconds)


def drop_lone_nodes(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Without the rows of nodes that have one process: they say again what its own rows say."""
    processes: dict[str, set[str]] = {}
    for row in rows:
        if not is_node(row):
            processes.setdefault(row.node, set()).add(row.process)
    return [row for row in rows if not is_node(row) or len(processes[row.node]) > 1]


def process_kind(process: str) -> str:
    """Such as `critic rank` of `critic rank 3`."""
    return process.rstrip("0123456789").rstrip()


def fullest_of_kinds(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Of each kind of process in each phase: the numbers of the one that was fullest, by what its
    line is held against."""
    fullest: dict[tuple[str, str], list[Comparison]] = {}
    for (process, phase), group in groupby(comparisons, lambda one: (one.process, one.phase)):
        own, key = list(group), (process_kind(process), phase)
        # The last is of the card, if there is one.
        if key not in fullest or own[-1].measured > fullest[key][-1].measured:
            fullest[key] = own
    return [one for own in fullest.values() for one in own]


def nearest_to_line(rows: Sequence[LedgerRow]) -> tuple[LedgerRow, LedgerRow]:
    """When a card or a node was nearest its line: the process that held most there then, and the
    row of the card or node. Of cards what they show as used counts, of nodes only what this run
    held."""
    fullest = max(
        (row for row in rows if is_node(row) or row.measured.device is not None),
        key=lambda row: row.measured.fullest / row.line.capacity,
    )
    if not is_node(fullest):
        return fullest, fullest
    then = (fullest.step, fullest.phase)
    together = (row for row in rows if (row.step, row.phase) == then and not is_node(row))
    return max(together, key=lambda row: row.measured.host), fullest
