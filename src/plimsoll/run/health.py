"""Health warnings: a figure outside of its healthy range, what it usually means and what to try.

docs/rollouts.md has the ranges and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan

from plimsoll.run.health_ranges import RANGES, HealthAdvice

QUIET = 20
"""Steps within the range after which a figure is warned of again: a figure that moves around an end
of its range is one problem, not many."""


@dataclass(frozen=True)
class HealthWarning:
    """A figure outside of its range."""

    metric: str
    value: float
    low: float
    """Lowest healthy value."""
    high: float
    """Highest healthy value."""
    what: str
    """What the figure is."""
    advice: HealthAdvice
    """Advice for the side of the range on which the value is."""

    def __str__(self) -> str:
        return (
            f"warning: {self.metric} is {self.value:.3g}{self._range} ({self.what}). "
            f"{self.advice.means} Try: {self.advice.attempt}"
        )

    @property
    def _range(self) -> str:
        if isnan(self.value):
            return ""
        if self.high == inf:
            return f", healthy is {self.low:.3g} or more"
        return f", healthy is {self.low:.3g} to {self.high:.3g}"


def warnings_of(metrics: Mapping[str, float]) -> list[HealthWarning]:
    """Return a warning for each metric outside of its range, in the order of the ranges.

    NaN is outside of every range. Earlier warnings do not matter here.
    """
    warnings = []
    for metric, healthy in RANGES.items():
        low, high = healthy.bounds(metrics)
        if metric in metrics and not low <= (value := metrics[metric]) <= high:
            advice = (
                _NOT_A_NUMBER if isnan(value) else healthy.below if value < low else healthy.above
            )
            warnings.append(HealthWarning(metric, value, low, high, healthy.what, advice))
    return warnings


def due_warnings(step: int, metrics: Mapping[str, float]) -> list[HealthWarning]:
    """Return the warnings of a step, without those of metrics that have yet to settle."""
    return [w for w in warnings_of(metrics) if step > RANGES[w.metric].settles]


_NOT_A_NUMBER = HealthAdvice(
    "Something was divided by 0, or grew past what its dtype holds; it spreads from here.",
    "the responses of this step (plimsoll rollouts RUN), a reward or loss of one's own, a lower "
    "learning rate.",
)


class HealthWatch:
    """The health of a run in progress: the last step at which each metric was out of its range."""

    def __init__(self, rows: Sequence[Mapping[str, float | None]] = ()) -> None:
        """Begin with the rows of metrics.jsonl of a run that resumes; they have null for NaN."""
        self._last_outside: dict[str, int] = {}
        for row in rows[-QUIET:]:
            metrics = {name: nan if value is None else value for name, value in row.items()}
            self.add(int(row["step"] or 0), metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> list[HealthWarning]:
        """Add a step's metrics, and return the warnings to show.

        A warning is shown if the figure was in its range for `QUIET` steps, or from the beginning.
        """
        due = due_warnings(step, metrics)
        new = [w for w in due if step - self._last_outside.get(w.metric, -inf) > QUIET]
        self._last_outside |= {warning.metric: step for warning in due}
        return new


GRAM = 4
REPEATS = 0.5
"""Share of repeated 4-grams above which a response repeats itself. Human text has 0.01 to 0.02,
degenerate text of greedy decoding over 0.4 (Welleck et al. 2019, arXiv:1908.04319, seq-rep-4);
steps of arithmetic lie between."""


def repetition(tokens: Iterable[int]) -> float:
    """Return the share of a response's 4-grams that occurred earlier in it, 0 to 1.

    [1 2 3 4 1 2 3 4] has five 4-grams, and the last equals the first: 0.2. A response without
    4-grams has 0.
    """
    ids = list(tokens)
    grams = list(zip(*(ids[i:] for i in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repeating(responses: Sequence[Iterable[int]]) -> float:
    """Return the share of responses (each as its tokens) that repeat themselves; 0 if none."""
    if not responses:
        return 0.0
    return sum(repetition(tokens) > REPEATS for tokens in responses) / len(responses)
