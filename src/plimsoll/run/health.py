"""Whether a step's figures are healthy: a warning where one leaves its range, with what it is, what
it usually means and what to try. docs/rollouts.md has the ranges, with where each is from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan

from plimsoll.run.health_ranges import RANGES, HealthAdvice

QUIET = 20
"""A figure is warned of again after so many steps within its range: one that comes and goes at an
end of it is one trouble, not many."""


@dataclass(frozen=True)
class HealthWarning:
    """A figure outside of its range, low to high. what: what it is. advice: of the side where it
    is."""

    metric: str
    value: float
    low: float
    high: float
    what: str
    advice: HealthAdvice

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
    """Of a step's metrics those that are outside of their ranges, in the ranges' order; whatever
    was warned of before. NaN is outside of every range."""
    found = []
    for metric, one in RANGES.items():
        low, high = one.bounds(metrics)
        if metric in metrics and not low <= (value := metrics[metric]) <= high:
            advice = _NOT_A_NUMBER if isnan(value) else one.below if value < low else one.above
            found.append(HealthWarning(metric, value, low, high, one.what, advice))
    return found


_NOT_A_NUMBER = HealthAdvice(
    "Something was divided by 0, or grew past what its dtype holds; it spreads from here.",
    "the responses of this step (plimsoll rollouts RUN), a reward or loss of one's own, a lower "
    "learning rate.",
)


@dataclass(frozen=True)
class Health:
    """last_outside: by metric, the last step at which it was outside of its range."""

    last_outside: Mapping[str, int] = field(default_factory=dict)

    def after(self, step: int, metrics: Mapping[str, float]) -> tuple[Health, list[HealthWarning]]:
        """The health after one more step, and what is to be told of it: of figures that are outside
        and were within for `QUIET` steps, or from the beginning."""
        found = warnings_of(metrics)
        settled = [one for one in found if step > RANGES[one.metric].settles]
        told = [o for o in settled if step - self.last_outside.get(o.metric, -inf) > QUIET]
        return Health({**self.last_outside, **{one.metric: step for one in settled}}), told


def health_after(rows: Sequence[Mapping[str, float | None]]) -> Health:
    """The health of a run that goes on, from its rows of metrics.jsonl, which have null for NaN."""
    health = Health()
    first = rows[-1]["step"] or 0.0 if rows else 0.0
    for row in rows:
        step = int(row["step"] or 0)
        if step > first - QUIET:
            known = {name: nan if value is None else value for name, value in row.items()}
            health, _ = health.after(step, known)
    return health


class HealthWatch:
    """The health of a run under way. health: what it begins with."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def add(self, step: int, metrics: Mapping[str, float]) -> list[HealthWarning]:
        """Take a step's metrics; give what is to be told."""
        self._health, told = self._health.after(step, metrics)
        return told


GRAM = 4
REPEATS = 0.5
"""A response repeats itself where more than this share of its 4-grams came before in it. Text of
people has 0.01 to 0.02, degenerate text of greedy decoding over 0.4 (Welleck et al. 2019,
arXiv:1908.04319, seq-rep-4); steps of arithmetic lie between."""


def repetition(tokens: Iterable[int]) -> float:
    """The share of a response's 4-grams that came before in it, 0 to 1; 0 where it has none.

    [1 2 3 4 1 2 3 4] has five 4-grams, the last of which is the first: 0.2.
    """
    ids = list(tokens)
    grams = list(zip(*(ids[i:] for i in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repeating(responses: Sequence[Iterable[int]]) -> float:
    """The share of responses that repeat themselves; each its tokens. 0 of none."""
    if not responses:
        return 0.0
    return sum(repetition(tokens) > REPEATS for tokens in responses) / len(responses)
