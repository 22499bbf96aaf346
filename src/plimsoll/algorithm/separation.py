"""How well a number tells two groups apart, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np

from plimsoll.algorithm.interval import NORMAL_95
from plimsoll.records import Floats

_HALVINGS = 60


def share_ahead(better: Floats, worse: Floats) -> float:
    """Of all pairs of one number of each group, the share in which the better group's is the
    larger; a tie counts half. That is the area under the ROC curve; 0.5 is chance, however large
    each group is. Neither may be empty.
    """
    ordered = np.sort(worse)
    below, up_to = (np.searchsorted(ordered, better, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(worse)))


def separation_interval(share: float, better: int, worse: int) -> tuple[float, float]:
    """The 95 % confidence interval of a `share_ahead` of groups of independent numbers.

    better, worse: how many numbers each group has.

    Newcombe 2006, https://doi.org/10.1002/sim.2324, method 5: Hanley and McNeil's variance with the
    groups' mean size, at the bound itself, so that the interval stays within [0, 1].
    """
    assert 0 <= share <= 1 and better > 0 and worse > 0
    size = (better + worse) / 2 - 1

    def reach(share: float) -> float:
        spread = (1 - share) / (2 - share) + share / (1 + share)
        return NORMAL_95 * sqrt(share * (1 - share) * (1 + size * spread) / (better * worse))

    low = _root(lambda bound: share - bound - reach(bound), 0.0, share)
    high = _root(lambda bound: share - bound + reach(bound), share, 1.0)
    return low, high


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is not below 0 at `low`, nor above it at `high`, is 0."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
