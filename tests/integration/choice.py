"""Which cases `make test` runs; the others are slow, and run in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]
Pair = tuple[tuple[int, Any], tuple[int, Any]]
"""Two values, each with the number of its axis."""


def slow(*values: Any) -> Any:
    """A case for `parametrize`, of one value for each of its names: another case that is not slow
    runs the same lines."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(
    *axes: Sequence[Any],
    allowed: Callable[[Case], bool] = lambda case: True,
    apart: Collection[tuple[int, int]] = (),
) -> list[Case]:
    """A few combinations of one value from each axis, in which every two values of two axes occur
    together: again and again the combination with the most pairs that are still missing.

    allowed: whether a combination is one at all. apart: axes, the smaller number first, whose
    values need not all occur together.
    """

    def wanted(case: Case) -> set[Pair]:
        return {pair for pair in pairs(case) if (pair[0][0], pair[1][0]) not in apart}

    everything = {case: wanted(case) for case in filter(allowed, product(*axes))}
    missing = set().union(*everything.values())
    chosen: list[Case] = []
    while missing:
        best = max(everything, key=lambda case: len(missing & everything[case]))
        chosen.append(best)
        missing -= everything[best]
    return chosen


def pairs(case: Case) -> set[Pair]:
    """Return all pairs of values of two axes, each value with the number of its axis."""
    return set(combinations(enumerate(case), 2))
