"""What a person sees while a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TextIO, TypeVar

from plimsoll.run.clock import TimedPhase
from plimsoll.run.counting import counted, duration_text
from plimsoll.run.displays import Advance, LoggedDisplay, display_for
from plimsoll.run.responses import ResponseGroup
from plimsoll.run.step_report import BEFORE_STEPS, Figure, RunProgress, StepReport, headline

Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass
class _Phase:
    """What goes on now. done: how many of its calls that are counted."""

    name: TimedPhase
    start: float
    done: int = 0

    def __str__(self) -> str:
        done = f", {self.done:,} done" if self.done else ""
        return f"{self.name}{done}, {duration_text(time.monotonic() - self.start)}"


class Progress:
    """Shows a run's progress; a context manager.

    Args:
        job: what runs, such as `ppo`.
        steps: how many the whole run has; None until that is known.
        directory: where it writes.
        stream: where to show; default: standard output.
        log: takes the lines that are shown, too.
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
        self._steps = steps or 0
        self._directory = directory
        self._stream = stream if stream is not None else sys.stdout
        self._last: dict[str, Figure] = {}
        self._sampled: ResponseGroup | None = None
        self._steps_seen = 0
        self._seconds = 0.0
        self._phase: _Phase | None = None

    def __enter__(self) -> Progress:
        display = display_for(self._stream, lambda: str(self._phase or ""))
        self._display = display if self._log is None else LoggedDisplay(display, self._log)
        steps = f"{counted(self._steps, 'step')}, " if self._steps else ""
        self.note(f"{self._job}: {steps}written to {self._directory}")
        return self

    def lasts(self, steps: int) -> None:
        """Now it is known how many steps the run has."""
        self._steps = steps

    def __exit__(self, *_: object) -> None:
        self._phase = None
        self._display.close()

    def update(self, report: StepReport) -> None:
        """Show a step that has just ended; or step 0, an evaluation before training, which says
        nothing of how long steps take."""
        self._last |= headline(report.metrics)
        left = None
        if report.step > 0:
            self._steps_seen += 1
            self._seconds += report.seconds_without(BEFORE_STEPS)
            left = (self._steps - report.step) * self._seconds / self._steps_seen
        self._display.show(
            RunProgress(self._job, self._steps, report, self._last, left, self._sampled)
        )

    @property
    def steps(self) -> int:
        """How many the whole run has; 0 until that is known."""
        return self._steps

    @property
    def shows_responses(self) -> bool:
        """Whether there is a place for sampled ones."""
        return self._display.shows_responses

    def sampled(self, group: ResponseGroup) -> None:
        """Have responses to one prompt shown from the next step's end on."""
        self._sampled = group

    def enter(self, phase: TimedPhase) -> None:
        """Show what goes on from here, and for how long."""
        self._phase = _Phase(phase, time.monotonic())

    def counted(self, function: Callable[Given, Made]) -> Callable[Given, Made]:
        """Return the same function, whose calls are counted in the phase that goes on."""

        def call(*given: Given.args, **named: Given.kwargs) -> Made:
            made = function(*given, **named)
            if self._phase is not None:
                self._phase.done += 1
            return made

        return call

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._display.note(text)

    def counting(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show how far something is that comes before the steps; within: a function that takes how
        many more are done. total: None where it is not known."""
        return self._display.counting(what, total)
