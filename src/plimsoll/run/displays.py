"""The report of a step, and the two ways to show a run's progress.

A terminal has a block that is redrawn in place: a bar with the remaining time, the last values, a
good and a bad response, and the current phase. Elsewhere (a pipe, a log file, a dumb terminal)
there is one plain ASCII line per step.

If the output cannot be written any more (`plimsoll ppo ... | head -1`, or a full disk), one line on
standard error says so, and the run continues.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plimsoll.run.console import terminal_of
from plimsoll.run.ledger import MemoryUse
from plimsoll.run.numbers import duration_text
from plimsoll.run.output import silence, tell
from plimsoll.run.responses import ResponseGroup, excerpt

_HEADLINE = re.compile(
    r"reward|reward/.+|rewards/margin|accuracy|kl|(teacher_)?divergence|loss|value_loss|eval/.+"
)
_HEADLINES = 8
BEFORE_STEPS = frozenset({"data", "precompute", "load"})
BESIDE_STEPS = BEFORE_STEPS | {"eval", "save"}
"""Phases that do not work on a step's tokens."""


@dataclass(frozen=True)
class StepReport:
    """The report of a step that has ended."""

    step: int
    metrics: Mapping[str, float]
    """Values by name, such as `reward`, `reward/math_answer`, `kl`, `policy_loss`."""
    tokens: int
    """Number of tokens that the step worked on."""
    seconds: Mapping[str, float]
    """Seconds of each phase since the last report; their sum is the step's time."""
    memory: Mapping[str, MemoryUse]
    """Peak of each process and node."""
    tokens_at_peak: float | None = None
    """See `Planned`."""
    gpu_busy: float | None = None
    """Share of time in which cards computed, in phases that work on tokens; None if unknown."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases of the step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in the phases that work on the step's tokens; 0 if none was timed.

        The time to read data, load, precompute, evaluate and save is left out.
        """
        seconds = self.seconds_without(BESIDE_STEPS)
        return self.tokens / seconds if seconds > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the cards' peak FLOPs that the step reached; None if the peak is unknown."""
        if self.tokens_at_peak is None:
            return None
        return self.tokens_per_second / self.tokens_at_peak

    def seconds_without(self, phases: Set[str]) -> float:
        """Return the seconds of all phases except the given ones."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase not in phases)


@dataclass(frozen=True)
class Figure:
    """The value of a metric, with its confidence interval if it has one."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def interval_text(self) -> str:
        """The interval as ` (0.533 to 0.641)`, with the space; "" if there is none."""
        return "" if self.interval is None else " ({:.4g} to {:.4g})".format(*self.interval)


def figures(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """Return the metrics as figures by name; `<name>_low`, `<name>_high` become an interval."""
    intervals = {
        name: (metrics[f"{name}_low"], metrics[f"{name}_high"])
        for name in metrics
        if {f"{name}_low", f"{name}_high"} <= metrics.keys()
    }
    ends = {f"{name}_{end}" for name in intervals for end in ("low", "high")}
    return {
        name: Figure(value, intervals.get(name))
        for name, value in metrics.items()
        if name not in ends
    }


def headline(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """Return the metrics that are shown at every step, at most 8, in their order.

    These are rewards, KL, losses, accuracies and evaluations. The only part of a reward is left out
    if it is the reward.
    """
    shown = {name: x for name, x in figures(metrics).items() if _HEADLINE.fullmatch(name)}
    parts = [name for name in shown if name.startswith("reward/")]
    if len(parts) == 1 and shown[parts[0]] == shown.get("reward"):
        del shown[parts[0]]
    return dict(list(shown.items())[:_HEADLINES])


@dataclass(frozen=True)
class RunProgress:
    """A step's report together with the progress of its run, for a display."""

    job: str
    steps: int
    report: StepReport
    metrics: Mapping[str, Figure]
    """Last value of each headline metric; not every step has all of them."""
    seconds_left: float | None
    """Estimated seconds to the end of the run; None before the first step."""
    sampled: ResponseGroup | None = None
    """Responses to one prompt, of the last step that has responses."""

    @property
    def left(self) -> str:
        """The time that is left as text, such as `0:00:04`; "" if unknown."""
        return "" if self.seconds_left is None else duration_text(self.seconds_left)


Advance = Callable[[int], None]
"""Takes the number of items that were done since the last call; updates a shown count."""

LINE_EVERY = 100_000
"""Items between two printed lines of a count whose total is unknown."""


@contextmanager
def counting(what: str, total: int, stream: TextIO) -> Iterator[Advance]:
    """Show a count of items during the block; yield the function that advances the count."""
    if console := terminal_of(stream):
        bar, advance = count_bar(what, total, console)
        with bar:
            yield advance
        return
    yield count_lines(what, total, lambda line: print(line, file=stream, flush=True))


def count_bar(what: str, total: int | None, console: Console) -> tuple[Progress, Advance]:
    """Return a progress bar and the function that advances it. `total` is None if unknown."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    return bar, partial(bar.advance, bar.add_task(what, total=total))


def count_lines(what: str, total: int | None, say: Callable[[str], None]) -> Advance:
    """Return a function that counts items, and passes lines about the count to `say`.

    There is a line after each tenth of the total, or after each `LINE_EVERY` items if `total` is
    None.
    """
    lines, counted = (1, LINE_EVERY) if total is None else (10, total)
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        before, done = done, done + more
        if before * lines // counted < done * lines // counted:
            say(f"{what} {done:,}" if total is None else f"{what} {done}/{total}")

    return advance


_UNSEEN = (
    "standard output cannot be written any more ({why}): the run goes on unseen; its "
    "metrics.jsonl shows how far it is, and `kill -INT {pid}` saves and stops it"
)


def write_lines_to(stream: TextIO) -> Callable[[str], None]:
    """Return a function that writes lines to a stream, until the stream cannot be written to."""

    def write(line: str) -> None:
        encoding = stream.encoding or "utf-8"
        safe = line.encode(encoding, errors="backslashreplace").decode(encoding)
        try:
            stream.write(safe + "\n")
            stream.flush()
        except OSError as error:
            silence(stream.fileno())
            tell(_UNSEEN.format(why=error.strerror, pid=os.getpid()))

    return write


def plain_line(progress: RunProgress) -> str:
    """Return a step's report as one ASCII line. Figures are padded, so lines align in columns."""
    report = progress.report
    width = len(str(progress.steps))
    phases = ", ".join(f"{phase} {s:.1f}" for phase, s in report.seconds.items())
    figures_shown = [  # padded to the width of their kind
        f"{name} {figure.value:>9.4g}"
        + (f"{figure.interval_text:<21}" if figure.interval_text else "")
        for name, figure in headline(report.metrics).items()
    ]
    parts = [
        f"{progress.job} step {report.step:>{width}}/{progress.steps}",
        *figures_shown,
        *([f"{report.tokens_per_second:>8,.0f} tokens/s"] if report.step else []),
        f"{report.total_seconds:>6.1f} s" + (f" ({phases})" if phases else ""),
        *([f"memory {', '.join(memory)}"] if (memory := _memory_texts(report)) else []),
        *([f"left {progress.left}"] if progress.left else []),
    ]
    return " | ".join(parts).encode("ascii", errors="backslashreplace").decode("ascii")


class LiveBlock:
    """A block at the bottom of a terminal, redrawn in place several times a second."""

    def __init__(self, console: Console, now: Callable[[], str]) -> None:
        self._now = now
        self._block: RenderableType = Group()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._current_block)
        self._live.start()

    def _current_block(self) -> RenderableType:
        now = self._now()
        return Group(self._block, Text(f"now      {now}", style="dim")) if now else self._block

    def show(self, progress: RunProgress) -> None:
        """Redraw the block with the step that has just ended."""
        self._redraw(live_block(progress))

    def note(self, text: str) -> None:
        """Print a line above the block."""
        self._live.console.print(Text(text))

    @contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show a bar instead of the block, and yield the function that advances it.

        Afterwards the block is empty.
        """
        bar, advance = count_bar(what, total, self._live.console)
        self._redraw(bar)
        try:
            yield advance
        finally:
            self._redraw(Group())

    def close(self) -> None:
        """Leave the last block on the screen, with the cursor below it."""
        self._live.stop()

    def _redraw(self, block: RenderableType) -> None:
        self._block = block
        self._live.refresh()


def live_block(progress: RunProgress) -> Group:
    """Return the run's progress bar, with metrics, speed, memory and sampled responses below it."""
    report = progress.report
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"{progress.job} {report.step}/{progress.steps}", style="bold"),
        ProgressBar(total=progress.steps, completed=report.step),
        Text(f"{progress.left} left" if progress.left else ""),
    )
    values = Table.grid(padding=(0, 1))
    values.add_column(style="dim", no_wrap=True)
    values.add_column()
    figures_shown = [
        f"{name} {figure.value:.4g}{figure.interval_text}"
        for name, figure in progress.metrics.items()
    ]
    rows = {
        "metrics": figures_shown,
        "speed": [
            f"{report.tokens_per_second:,.0f} tokens/s",
            f"{report.total_seconds:.1f} s/step",
        ],
        "seconds": [f"{phase} {seconds:.1f}" for phase, seconds in report.seconds.items()],
        "memory": _memory_texts(report),
    }
    for label, texts in rows.items():
        if texts:
            values.add_row(label, Text("   ".join(texts)))
    if group := progress.sampled:
        values.add_row("prompt", _Excerpt(group.prompt, 1))
        first, last = group.responses[0], group.responses[-1]
        # If all rewards are equal, there is only one response.
        by_name = {"best": first, "worst": last} if group.spread else {"sampled": first}
        for name, shown in by_name.items():
            values.add_row(f"{name} {shown.reward:.4g}", _Excerpt(shown.response, 2))
    return Group(bar, values)


class _Excerpt:
    """The beginning and the end of a text, cut to some lines of a column."""

    def __init__(self, text: str, lines: int) -> None:
        self.text, self.lines = text, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        lines = chop_cells(excerpt(self.text, self.lines * width), width)
        yield Text("\n".join(lines[: self.lines]))


def _memory_texts(report: StepReport) -> list[str]:
    """Return a text for the fullest process of each kind, without the controller.

    The node has a text, too, unless it only has one process.
    """
    hidden = ("controller", "node ") if len(report.memory) == 2 else ("controller",)
    memory = report.memory.items()
    return [f"{name} {use.text}" for name, use in memory if not name.startswith(hidden)]
