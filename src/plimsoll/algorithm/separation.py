"""Measure how well a number tells two groups apart, with the confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from math import sqrt

import numpy as np

from plimsoll.algorithm.interval import NORMAL_95, Doubles, design_effect
from plimsoll.records import Bools, Floats

_HALVINGS = 60


def share_ahead(better: Floats, worse: Floats) -> float:
    """Return the share of pairs (one number of each group) in which the better group's is larger.

    A tie counts half. It is the area under the ROC curve; 0.5 is chance, however large each group
    is. Neither group may be empty.
    """
    return float(_ranks(better, worse).mean() / (2 * len(worse)))


def separation_effect(values_N: Floats, better_N: Bools, prompts: Iterable[Hashable]) -> float:
    """Return the design effect (see `interval`) of the `share_ahead` of two groups of numbers.

    A prompt may have several numbers, of one group or of both. It is computed from each number's
    rank among the other group's (Obuchowski 1997, https://doi.org/10.2307/2533958).
    """
    better, worse = values_N[better_N], values_N[~better_N]
    better_places, worse_places = _ranks(better, worse), 2.0 * len(better) - _ranks(worse, better)
    total = better_places.sum()
    # All times 2 len(better)^2 len(worse)^2, so that sums are exact.
    influence_N = np.empty(len(values_N))
    influence_N[better_N] = len(worse) * (len(better) * better_places - total)
    influence_N[~better_N] = len(better) * (len(worse) * worse_places - total)
    return design_effect(influence_N, prompts)


def separation_interval(share: float, better: float, worse: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of a `share_ahead` of groups of independent numbers.

    Newcombe 2006, https://doi.org/10.1002/sim.2324, method 5: Hanley and McNeil's variance with the
    groups' mean size, at the bound itself, so that the interval stays within [0, 1]. The sizes of
    the groups are divided by the design effect if their numbers share prompts.
    """
    assert 0 <= share <= 1 and better > 0 and worse > 0
    size = (better + worse) / 2 - 1

    def reach(share: float) -> float:
        spread = (1 - share) / (2 - share) + share / (1 + share)
        return NORMAL_95 * sqrt(share * (1 - share) * (1 + size * spread) / (better * worse))

    low = _root(lambda bound: share - bound - reach(bound), 0.0, share)
    high = _root(lambda bound: share - bound + reach(bound), share, 1.0)
    return low, high


def _ranks(numbers: Floats, others: Floats) -> Doubles:
    """Return twice the number of `others` that each number is ahead of; a tie counts once."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, numbers, side) for side in ("left", "right"))
    return (below + up_to).astype(np.float64)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a falling function that is >= 0 at `low` and <= 0 at `high`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
