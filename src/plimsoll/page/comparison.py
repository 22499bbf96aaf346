"""The ledger in short: predicted beside measured memory, by process and phase, over all steps."""

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
    """One measure of one process in one phase, as the maximum over all steps, in bytes."""

    process: str
    phase: str
    measure: Measure
    predicted: int | None
    """The planned bytes; None if the plan has none."""
    measured: int
    seconds: float
    """Duration of the phase, summed over all steps."""

    @property
    def over(self) -> float | None:
        """Share by which measured exceeds predicted; negative if it is less."""
        return None if not self.predicted else self.measured / self.predicted - 1


def compare(rows: Iterable[LedgerRow]) -> list[Comparison]:
    """Return the comparisons in the order of first appearance; those of nodes are last."""
    return [
        comparison
        for process_rows in group_rows(sorted(rows, key=is_node), lambda row: row.process).values()
        for phase_rows in group_rows(process_rows, lambda row: row.phase).values()
        for comparison in _comparisons(phase_rows)
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
    """Return the rows without those of nodes that run one process, which only repeat it."""
    processes: dict[str, set[str]] = {}
    for row in rows:
        if not is_node(row):
            processes.setdefault(row.node, set()).add(row.process)
    return [row for row in rows if not is_node(row) or len(processes[row.node]) > 1]


def process_kind(process: str) -> str:
    """Return the kind of a process, such as `critic rank` for `critic rank 3`."""
    return process.rstrip("0123456789").rstrip()


def fullest_of_kinds(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparisons of the fullest process of each kind in each phase."""
    fullest: dict[tuple[str, str], list[Comparison]] = {}
    for (process, phase), group in groupby(
        comparisons, lambda comparison: (comparison.process, comparison.phase)
    ):
        measures, key = list(group), (process_kind(process), phase)
        # The last is of the card, if there is one.
        if key not in fullest or measures[-1].measured > fullest[key][-1].measured:
            fullest[key] = measures
    return [comparison for measures in fullest.values() for comparison in measures]


def nearest_to_line(rows: Sequence[LedgerRow]) -> tuple[LedgerRow, LedgerRow]:
    """Return the rows of the main process and of the card or node nearest to its load line.

    Of a card, all that it shows as used counts; of a node, only what this run held. The main
    process held most at that moment.
    """
    fullest = max(
        (row for row in rows if is_node(row) or row.measured.device is not None),
        key=lambda row: row.measured.fullest / row.line.capacity,
    )
    if not is_node(fullest):
        return fullest, fullest
    moment = (fullest.step, fullest.phase)
    rows_then = (row for row in rows if (row.step, row.phase) == moment and not is_node(row))
    return max(rows_then, key=lambda row: row.measured.host), fullest
