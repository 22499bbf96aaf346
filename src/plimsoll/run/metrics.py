"""A step's report, written once to every place that keeps or shows it."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.run.directory import RunDirectory
from plimsoll.run.progress import Progress, StepReport
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


def scalars_of(report: StepReport) -> dict[str, float]:
    """The report as a flat row: the metrics by their names, then `tokens`, `tokens_per_second`,
    `seconds/<phase>` and `memory_bytes/<role>`."""
    measured = {
        "tokens": float(report.tokens),
        "tokens_per_second": report.tokens_per_second,
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        **{f"memory_bytes/{name}": float(size) for name, size in report.memory_bytes.items()},
    }
    taken = {"step", *measured} & set(report.metrics)
    assert not taken, f"metrics must not be named {sorted(taken)}"
    return {**report.metrics, **measured}
