"""The report of an optimizer step, and the progress of the run at that step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from plimsoll.run.ledger import MemoryUse
from plimsoll.run.numbers import duration_text
from plimsoll.run.responses import ResponseGroup

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
