"""Write a step's report to metrics.jsonl, the loggers and the display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plimsoll.run.directory import RunDirectory
from plimsoll.run.gaming import suspects
from plimsoll.run.health import HealthWatch
from plimsoll.run.json_lines import append_row
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.loggers.open import Loggers
from plimsoll.run.progress import Progress
from plimsoll.run.responses import read_groups, widest_group
from plimsoll.run.step_report import StepReport


@dataclass(frozen=True)
class MetricsSink:
    """The places for a step's report: metrics.jsonl, the loggers and the progress display."""

    directory: RunDirectory
    progress: Progress
    loggers: Loggers = field(default_factory=Loggers)
    health: HealthWatch | None = None
    """Warns of unhealthy figures; None for a run whose figures have no healthy ranges."""
    notify: Callable[[str], None] = lambda text: None
    """Tells somebody who does not watch the display what is wrong, in one line."""

    def write(self, report: StepReport) -> None:
        """Write a step's row to file and loggers, show the step, and warn of unhealthy figures."""
        scalars = scalars_of(report)
        append_row(self.directory.metrics_path, {"step": report.step, **scalars})
        self.loggers.scalars(report.step, scalars, self.progress.note)
        sampled = self.directory.trajectories_path(report.step)
        if sampled.is_file():
            self.loggers.responses(report.step, sampled, self.progress.note)
            if self.progress.shows_responses:
                self.progress.show_group(widest_group(read_groups(sampled)))
        self.progress.update(report)
        if self.health is not None:
            for warning in self.health.add(report.step, report.metrics):
                groups = read_groups(sampled) if sampled.is_file() else ()
                seen = suspects(warning.metric, warning.value, groups)
                self.progress.note(f"{warning} Look at {seen}." if seen else str(warning))
                self.notify(f"step {report.step}: {warning.headline}")

    def write_ledger(self, rows: Sequence[LedgerRow]) -> None:
        """Append ledger rows, all of one step, to ledger.jsonl, and send their peaks to loggers."""
        write_ledger(self.directory.ledger_path, rows)
        if rows:
            scalars = {f"memory/{r.process}/{r.phase}": float(r.measured.fullest) for r in rows}
            self.loggers.scalars(rows[0].step, scalars, self.progress.note)


def scalars_of(report: StepReport) -> dict[str, float]:
    """Return a step's report as a flat dict of numbers by name.

    First come the metrics, then `tokens`, `tokens_per_second`, on cards `mfu` and `gpu_busy`, then
    `seconds/<phase>` and `memory_bytes/<process>`.
    """
    of_cards = {"mfu": report.mfu, "gpu_busy": report.gpu_busy}
    measured = {
        "tokens": float(report.tokens),
        "tokens_per_second": report.tokens_per_second,
        **{name: share for name, share in of_cards.items() if share is not None},
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        **{f"memory_bytes/{name}": float(use.measured) for name, use in report.memory.items()},
    }
    reserved = {"step", *measured} & set(report.metrics)
    assert not reserved, f"metrics must not be named {sorted(reserved)}"
    return {**report.metrics, **measured}
