"""What a person sees while a run goes on.

On a terminal: a bar with the time that is left, and the last values under it, redrawn in place.
Elsewhere (a pipe, a log file, a dumb terminal): one plain ASCII line per step. A run whose reader
goes away (`plimsoll ppo ... | head -1`), or whose log file's disk is full, says so once on standard
error, and goes on unseen.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plimsoll.run.counter import Advance, count_bar, count_lines
from plimsoll.run.ledger import MemoryUse
from plimsoll.run.numbers import duration_text
from plimsoll.run.output import silence, tell

_HEADLINE = re.compile(
    r"reward|reward/.+|rewards/margin|accuracy|kl|divergence|loss|value_loss|eval/.+"
)
_HEADLINES = 8
_BEFORE_STEPS = frozenset({"data", "precompute", "load"})
_BESIDE_STEPS = frozenset({"eval", "save"})
"""Phases that do no work on a step's tokens: of the first report, and of some later ones."""
_UNSEEN = (
    "standard output cannot be written any more ({why}): the run goes on unseen; its "
    "metrics.jsonl shows how far it is, and `kill -INT {pid}` saves and stops it"
)


@dataclass(frozen=True)
class StepReport:
    """What is known of a step when it is done.

    metrics: by name, such as `reward`, `reward/math_answer`, `kl`, `policy_loss`.
    tokens: how many tokens the step worked on.
    seconds: by phase since the last report; their sum is the step's time.
    memory: by process or node, the peak of the step.
    """

    step: int
    metrics: Mapping[str, float]
    tokens: int
    seconds: Mapping[str, float]
    memory: Mapping[str, MemoryUse]

    @property
    def total_seconds(self) -> float:
        """The time of the whole step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of the phases that work on the step's tokens: not of reading data and loading, nor of
        evaluating and saving. 0 where no time was measured."""
        seconds = self.seconds_without(_BEFORE_STEPS | _BESIDE_STEPS)
        return self.tokens / seconds if seconds > 0 else 0.0

    def seconds_without(self, phases: Set[str]) -> float:
        """The time of the other phases."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase not in phases)


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics worth a look at every step: rewards, KL, losses, accuracies; in their order."""
    found = [(name, value) for name, value in metrics.items() if _HEADLINE.fullmatch(name)]
    return dict(found[:_HEADLINES])


@dataclass(frozen=True)
class Standing:
    """A step's report within its run: what a display shows.

    metrics: the last value of each headline metric, also of those that not every step has.
    seconds_left: an estimate from the steps so far.
    """

    job: str
    steps: int
    report: StepReport
    metrics: Mapping[str, float]
    seconds_left: float


class Display(Protocol):
    """A way of showing progress."""

    def show(self, standing: Standing) -> None:
        """Show the step that has just ended."""

    def note(self, text: str) -> None:
        """Print a line that stays."""

    def counting(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a count while the block goes on. total: None where it is not known."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Progress:
    """Shows a run's progress; a context manager.

    job: what runs, such as `ppo`. steps: how many the whole run has. directory: where it writes.
    stream: where to show; default: standard output.
    """

    def __init__(self, job: str, steps: int, directory: Path, stream: TextIO | None = None) -> None:
        self._job = job
        self._steps = steps
        self._directory = directory
        self._stream = stream if stream is not None else sys.stdout
        self._last: dict[str, float] = {}
        self._steps_seen = 0
        self._seconds = 0.0

    def __enter__(self) -> Progress:
        self._display = _display_for(self._stream)
        self.note(f"{self._job}: {self._steps} steps, written to {self._directory}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._display.close()

    def update(self, report: StepReport) -> None:
        """Show a step that has just ended."""
        self._last |= headline(report.metrics)
        self._steps_seen += 1
        self._seconds += report.seconds_without(_BEFORE_STEPS)
        left = (self._steps - report.step) * self._seconds / self._steps_seen
        self._display.show(Standing(self._job, self._steps, report, self._last, left))

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._display.note(text)

    def counting(self, what: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show how far something is that comes before the steps; within: a function that takes how
        many more are done. total: None where it is not known."""
        return self._display.counting(what, total)


def _display_for(stream: TextIO) -> Display:
    # rich alone would also take FORCE_COLOR for a terminal, and write codes into log files.
    if stream.isatty():
        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return LiveDisplay(console)
    return PlainDisplay(stream)


class PlainDisplay:
    """A line per step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, standing: Standing) -> None:
        """Print the step's line."""
        self.note(plain_line(standing))

    def note(self, text: str) -> None:
        """Print a line."""
        encoding = self._stream.encoding or "utf-8"
        safe = text.encode(encoding, errors="backslashreplace").decode(encoding)
        try:
            self._stream.write(safe + "\n")
            self._stream.flush()
        except OSError as error:
            silence(self._stream.fileno())
            tell(_UNSEEN.format(why=error.strerror, pid=os.getpid()))

    @contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Advance]:
        """Print a line now and then."""
        yield count_lines(what, total, self.note)

    def close(self) -> None:
        """Nothing to restore."""


def plain_line(standing: Standing) -> str:
    """A step as one ASCII line; steps with the same metrics have them in the same columns."""
    report = standing.report
    width = len(str(standing.steps))
    phases = ", ".join(f"{phase} {s:.1f}" for phase, s in report.seconds.items())
    parts = [
        f"{standing.job} step {report.step:>{width}}/{standing.steps}",
        *(f"{name} {value:>9.4g}" for name, value in headline(report.metrics).items()),
        f"{report.tokens_per_second:>8,.0f} tokens/s",
        f"{report.total_seconds:>6.1f} s" + (f" ({phases})" if phases else ""),
        *([f"memory {', '.join(memory)}"] if (memory := _memory_texts(report)) else []),
        f"left {duration_text(standing.seconds_left)}",
    ]
    return " | ".join(parts).encode("ascii", errors="backslashreplace").decode("ascii")


class LiveDisplay:
    """A block at the bottom of a terminal that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()

    def show(self, standing: Standing) -> None:
        """Redraw the block."""
        self._live.update(live_block(standing), refresh=True)

    def note(self, text: str) -> None:
        """Print a line above the block."""
        self._live.console.print(Text(text))

    @contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Advance]:
        """A bar in the block's place, which is empty again afterwards."""
        bar, advance = count_bar(what, total, self._live.console)
        self._live.update(bar, refresh=True)
        try:
            yield advance
        finally:
            self._live.update("")

    def close(self) -> None:
        """Leave the last block where it is, and the cursor under it."""
        self._live.stop()


def live_block(standing: Standing) -> Group:
    """The bar, and under it the last values by kind; long lines wrap in their column."""
    report = standing.report
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"{standing.job} {report.step}/{standing.steps}", style="bold"),
        ProgressBar(total=standing.steps, completed=report.step),
        Text(f"{duration_text(standing.seconds_left)} left"),
    )
    values = Table.grid(padding=(0, 1))
    values.add_column(style="dim", no_wrap=True)
    values.add_column()
    for label, texts in _value_rows(standing).items():
        values.add_row(label, Text("   ".join(texts)))
    return Group(bar, values)


def _value_rows(standing: Standing) -> dict[str, list[str]]:
    report = standing.report
    speed = f"{report.tokens_per_second:,.0f} tokens/s"
    rows = {
        "metrics": [f"{name} {value:.4g}" for name, value in standing.metrics.items()],
        "speed": [speed, f"{report.total_seconds:.1f} s/step"],
        "seconds": [f"{phase} {seconds:.1f}" for phase, seconds in report.seconds.items()],
        "memory": _memory_texts(report),
    }
    return {label: texts for label, texts in rows.items() if texts}


def _memory_texts(report: StepReport) -> list[str]:
    """The fullest of each kind of process that computes, and where they are several, the fullest
    node."""
    fullest: dict[str, str] = {}
    for name, use in report.memory.items():
        kind = name.rstrip("0123456789")
        if kind == "recipe" or (kind == "node " and len(report.memory) == 2):
            continue
        if kind not in fullest or use.measured > report.memory[fullest[kind]].measured:
            fullest[kind] = name
    return [f"{name} {report.memory[name].text}" for name in fullest.values()]
