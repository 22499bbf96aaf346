"""Compute the mean and standard deviation of all values of a reward since the run began.

Chan, Golub and LeVeque 1979: two sets have counts n and m, means a and b, and sums S and T of
squared differences from their means. Their union has the mean a + (b - a) * m / (n + m) and the
sum S + T + (b - a)^2 * n * m / (n + m). For m = 1 this is Welford's algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

MomentsState = dict[str, float]
"""`count`, `mean`, and `squares`: the sum of the squared differences from the mean."""

_LEAST_DEVIATION = 1e-8


class RunningMoments:
    """Mean and standard deviation of the values that were added so far."""

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
        """Return (value - mean) / standard deviation; (value - mean) if the deviation is 0.

        The deviation has n - 1 in its denominator.
        """
        deviation = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        return (value - self._mean) / (deviation if deviation > _LEAST_DEVIATION else 1.0)

    def state(self) -> MomentsState:
        """Return the moments as numbers by name, for `restore` in a resumed run."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Replace the moments by those in a state that `state` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares = state["squares"]
