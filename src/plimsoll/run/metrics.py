"""A step's report, written once to every place that keeps or shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.run.directory import RunDirectory
from plimsoll.run.ledger import LedgerRow, ledger_values
from plimsoll.run.progress import Progress
from plimsoll.run.standing import StepReport
from plimsoll.run.tensorboard import TensorBoardWriter


@dataclass(frozen=True)
class MetricsSink:
    """metrics.jsonl, TensorBoard (where wanted) and the progress display, as one."""

    directory: RunDirectory
    progress: Progress
    tensorboard: TensorBoardWriter | None = None

    def write(self, report: StepReport) -> None:
        """Write the step's row, then show it."""
        scalars = scalars_of(report)
        self.directory.append_metrics({"step": report.step, **scalars})
        if self.tensorboard is not None:
            self.tensorboard.write(report.step, scalars)
        self.progress.update(report)

    def write_ledger(self, rows: Sequence[LedgerRow]) -> None:
        """Write rows of the ledger, all of one step."""
        self.directory.append_ledger(map(ledger_values, rows))
        if self.tensorboard is not None and rows:
            scalars = {f"memory/{r.process}/{r.phase}": float(r.measured.fullest) for r in rows}
            self.tensorboard.write(rows[0].step, scalars)


def scalars_of(report: StepReport) -> dict[str, float]:
    """The report as a flat row: the metrics by their names, then `tokens`, `tokens_per_second`,
    `seconds/<phase>` and `memory_bytes/<process>`."""
    measured = {
        "tokens": float(report.tokens),
        "tokens_per_second": report.tokens_per_second,
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        **{f"memory_bytes/{name}": float(use.measured) for name, use in report.memory.items()},
    }
    taken = {"step", *measured} & set(report.metrics)
    assert not taken, f"metrics must not be named {sorted(taken)}"
    return {**report.metrics, **measured}
