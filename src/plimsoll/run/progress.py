"""Show the progress of a run, and write the report of each step.

Progress is shown on a terminal or as lines, and in the log. A report is written to metrics.jsonl
and to the loggers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ParamSpec, TextIO, TypeVar

from plimsoll.run.console import terminal_of
from plimsoll.run.directory import RunDirectory
from plimsoll.run.displays import (
    BEFORE_STEPS,
    Advance,
    Figure,
    LiveBlock,
    RunProgress,
    StepReport,
    count_lines,
    headline,
    plain_line,
    write_lines_to,
)
from plimsoll.run.health import HealthWatch, suspects
from plimsoll.run.json_lines import append_row
from plimsoll.run.ledger import Leak, LedgerFile, LedgerRow, process_kind
from plimsoll.run.loggers import Loggers
from plimsoll.run.numbers import duration_text, plural
from plimsoll.run.phases import TimedPhase
from plimsoll.run.responses import ResponseGroup, read_groups, widest_group

P = ParamSpec("P")
R = TypeVar("R")

_ABOUT = {"sync": ": the log-probs of each engine are compared with the trainer's"}
"""What a first phase does that may take minutes."""


class Progress:
    """A context manager that shows a run's progress.

    Args:
        job: The name of the job.
        steps: The total number of the run's steps; None if not known yet.
        directory: The run directory.
        stream: The stream to show on; standard output by default.
        log: Takes each line that is shown.

    Attributes:
        steps: The total number of the run's steps; 0 until it is known.
        live: The block on a terminal; None if the stream is none.
        sampled: The responses to one prompt that `update` shows.
    """

    def __init__(
        self,
        job: str,
        steps: int | None,
        directory: Path,
        stream: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._log = log
        self._job = job
        self.steps = steps or 0
        self._directory = directory
        self._stream = stream if stream is not None else sys.stdout
        self._last: dict[str, Figure] = {}
        self.sampled: ResponseGroup | None = None
        self._steps_seen = 0
        self._begun: set[TimedPhase] = set()
        self._seconds = 0.0
        self._phase: TimedPhase | None = None
        self._phase_start = 0.0
        self._calls_done = 0

    def __enter__(self) -> Progress:
        console = terminal_of(self._stream)
        self.live = None if console is None else LiveBlock(console, self._describe_phase)
        shown = [write_lines_to(self._stream)] if console is None else []
        self._takers_of_lines = [*shown] if self._log is None else [self._log, *shown]
        steps = f"{plural(self.steps, 'step')}, " if self.steps else ""
        self.note(f"{self._job}: {steps}written to {self._directory}")
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = None
        if self.live is not None:
            self.live.close()

    def _describe_phase(self) -> str:
        """Return the current phase, its finished calls and its time; "" between phases."""
        if self._phase is None:
            return ""
        done = f", {self._calls_done:,} done" if self._calls_done else ""
        return f"{self._phase}{done}, {duration_text(time.monotonic() - self._phase_start)}"

    def update(self, report: StepReport) -> None:
        """Show a step that has just ended; step 0 is the evaluation before training."""
        self._last |= headline(report.metrics)
        left = None
        if report.step > 0:
            self._steps_seen += 1
            self._seconds += report.seconds_without(BEFORE_STEPS)
            left = (self.steps - report.step) * self._seconds / self._steps_seen
        progress = RunProgress(self._job, self.steps, report, self._last, left, self.sampled)
        self._say(plain_line(progress))
        if self.live is not None:
            self.live.show(progress)

    def _say(self, line: str) -> None:
        """Pass a line to the log, and to the stream unless it is a terminal."""
        for take in self._takers_of_lines:
            take(line)

    def enter(self, phase: TimedPhase) -> None:
        """Show that a phase begins; before the first step, also where lines are printed."""
        self._phase, self._phase_start, self._calls_done = phase, time.monotonic(), 0
        if not self._steps_seen and phase not in self._begun:
            self._begun.add(phase)
            self._say(f"{self._job}: {phase} begins{_ABOUT.get(phase, '')}")

    def count_calls(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a wrapper of the function that counts its finished calls in the current phase."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            self._calls_done += 1
            return result

        return call

    def note(self, text: str) -> None:
        """Print a line, which stays on the screen."""
        self._say(text)
        if self.live is not None:
            self.live.note(text)

    @contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show a count of items during the block; yield the function that advances the count.

        `total` is None if it is unknown.
        """
        counts = [count_lines(what, total, take) for take in self._takers_of_lines]
        with ExitStack() as stack:
            if self.live is not None:
                counts.append(stack.enter_context(self.live.counting(what, total)))

            def advance(more: int) -> None:
                for count in counts:
                    count(more)

            yield advance


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
            if self.progress.live is not None:  # there is a place for them
                self.progress.sampled = widest_group(read_groups(sampled))
        self.progress.update(report)
        if self.health is not None:
            for warning in self.health.add(report.step, report.metrics):
                groups = read_groups(sampled) if sampled.is_file() else ()
                seen = suspects(warning.metric, warning.value, groups)
                self.progress.note(f"{warning} Look at {seen}." if seen else str(warning))
                self.notify(f"step {report.step}: {warning.headline}")

    @cached_property
    def ledger(self) -> LedgerFile:
        """The writer of ledger.jsonl."""
        return LedgerFile(self.directory.ledger_path)

    def write_ledger(self, rows: Sequence[LedgerRow]) -> None:
        """Add ledger rows, all of one step, to ledger.jsonl, and send peaks of kinds to loggers."""
        self.ledger.add(rows)
        peaks: dict[str, float] = {}
        for row in rows:
            name = f"memory/{process_kind(row.process)}/{row.phase}"
            peaks[name] = max(peaks.get(name, 0.0), float(row.measured.fullest))
        if rows:
            self.loggers.scalars(rows[0].step, peaks, self.progress.note)

    def write_leak(self, step: int, leak: Leak) -> None:
        """Append a leak that the step showed to leaks.jsonl, and show it."""
        append_row(self.directory.leaks_path, {"step": step, **asdict(leak)})
        self.progress.note(leak.text)


def scalars_of(report: StepReport) -> dict[str, float]:
    """Return a step's report as a flat dict of numbers by name.

    First come the metrics, then `tokens`, `tokens_per_second`, on cards `mfu` and `gpu_busy`, then
    `seconds/<phase>` and `memory_bytes/<kind of process>`.
    """
    of_cards = {"mfu": report.mfu, "gpu_busy": report.gpu_busy}
    measured = {
        "tokens": float(report.tokens),
        "tokens_per_second": report.tokens_per_second,
        **{name: share for name, share in of_cards.items() if share is not None},
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        **{f"memory_bytes/{process_kind(n)}": float(m.measured) for n, m in report.memory.items()},
    }
    reserved = {"step", *measured} & set(report.metrics)
    assert not reserved, f"metrics must not be named {sorted(reserved)}"
    return {**report.metrics, **measured}
