"""Compute mean and standard deviation of a reward's values over a whole run, number by number.

Chan, Golub and LeVeque 1979: two sets with counts n and m, means a and b, and sums of squared
differences from these S and T make one of the mean a + (b - a) * m / (n + m) and the sum
S + T + (b - a)^2 * n * m / (n + m). With m = 1 that is Welford's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

MomentsState = dict[str, float]
"""`count`, `mean`, and `squares`: the sum of the squared differences from the mean."""

_LEAST_DEVIATION = 1e-8


class RunningMoments:
    """Mean and standard deviation of the values so far."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        """Add further values."""
        if not values:
            return
        count, mean = len(values), fmean(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, difference = self._count + count, mean - self._mean
        self._squares += squares + difference**2 * self._count * count / total
        self._mean += difference * count / total
        self._count = total

    def normalize(self, value: float) -> float:
        """Return a value less the mean, over the standard deviation (n - 1) if that is not 0."""
        deviation = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        return (value - self._mean) / (deviation if deviation > _LEAST_DEVIATION else 1.0)

    def state(self) -> MomentsState:
        """Return what a resumed run needs."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares = state["squares"]
