"""What is known of a step when it is done, and of a run at that step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from plimsoll.run.counting import duration_text
from plimsoll.run.ledger import MemoryUse
from plimsoll.run.responses import ResponseGroup

_HEADLINE = re.compile(
    r"reward|reward/.+|rewards/margin|accuracy|kl|divergence|loss|value_loss|eval/.+"
)
_HEADLINES = 8
BEFORE_STEPS = frozenset({"data", "precompute", "load"})
BESIDE_STEPS = BEFORE_STEPS | {"eval", "save"}
"""Phases that do no work on a step's tokens: of the first report, and of some later ones."""


@dataclass(frozen=True)
class StepReport:
    """What is known of a step when it is done.

    metrics: by name, such as `reward`, `reward/math_answer`, `kl`, `policy_loss`.
    tokens: how many tokens the step worked on.
    seconds: by phase since the last report; their sum is the step's time.
    memory: by process or node, the peak of the step.
    tokens_at_peak: see `Planned`. gpu_busy: the share of the time of the phases that work on the
        tokens in which cards computed; None where it is not known.
    """

    step: int
    metrics: Mapping[str, float]
    tokens: int
    seconds: Mapping[str, float]
    memory: Mapping[str, MemoryUse]
    tokens_at_peak: float | None = None
    gpu_busy: float | None = None

    @property
    def total_seconds(self) -> float:
        """The time of the whole step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of the phases that work on the step's tokens: not of reading data and loading, nor of
        evaluating and saving. 0 where no time was measured."""
        seconds = self.seconds_without(BESIDE_STEPS)
        return self.tokens / seconds if seconds > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """The share of the cards' peak that the step reached (model FLOPs utilisation)."""
        if self.tokens_at_peak is None:
            return None
        return self.tokens_per_second / self.tokens_at_peak

    def seconds_without(self, phases: Set[str]) -> float:
        """The time of the other phases."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase not in phases)


@dataclass(frozen=True)
class Figure:
    """What a metric is; where it has one, with its confidence interval."""

    value: float
    interval: tuple[float, float] | None = None

    @property
    def interval_text(self) -> str:
        """Such as ` (0.533 to 0.641)`, behind the value; empty where there is none."""
        return "" if self.interval is None else " ({:.4g} to {:.4g})".format(*self.interval)


def figures(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """The metrics; `<name>_low` and `<name>_high`, where both are there, are the interval of
    `<name>`."""
    intervals = {
        name: (metrics[f"{name}_low"], metrics[f"{name}_high"])
        for name in metrics
        if {f"{name}_low", f"{name}_high"} <= metrics.keys()
    }
    ends = {f"{name}_{end}" for name in intervals for end in ("low", "high")}
    return {n: Figure(x, intervals.get(n)) for n, x in metrics.items() if n not in ends}


def headline(metrics: Mapping[str, float]) -> dict[str, Figure]:
    """The metrics worth a look at every step: rewards, KL, losses, accuracies; in their order."""
    found = [pair for pair in figures(metrics).items() if _HEADLINE.fullmatch(pair[0])]
    return dict(found[:_HEADLINES])


@dataclass(frozen=True)
class RunProgress:
    """A step's report within its run: what a display shows.

    metrics: the last of each headline metric, also of those that not every step has.
    sampled: responses to one prompt of the last step that has some.
    seconds_left: an estimate from the steps so far; None before the first one.
    """

    job: str
    steps: int
    report: StepReport
    metrics: Mapping[str, Figure]
    seconds_left: float | None
    sampled: ResponseGroup | None = None

    @property
    def left(self) -> str:
        """Such as `0:00:04`; empty where it is not known."""
        return "" if self.seconds_left is None else duration_text(self.seconds_left)
