"""Which cases `make test` runs; the others are slow, and run in `make test-all`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def slow(*values: Any) -> Any:
    """A case for `parametrize`, of one value for each of its names: another case that is not slow
    runs the same lines."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(*axes: Sequence[Any]) -> list[Case]:
    """A few combinations of one value from each axis, in which every two values of two axes occur
    together: again and again the combination with the most pairs that are still missing."""
    everything = list(product(*axes))
    missing = set().union(*map(pairs, everything))
    chosen: list[Case] = []
    while missing:
        best = max(everything, key=lambda case: len(missing & pairs(case)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(case: Case) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Of the values of two axes, each with the number of its axis."""
    return set(combinations(enumerate(case), 2))


def pairwise_first(*axes: Sequence[Any]) -> list[Any]:
    """All combinations for `parametrize`, of which those that `pairwise` chooses are not slow."""
    chosen = pairwise(*axes)
    rest = (case for case in product(*axes) if case not in chosen)
    return [*chosen, *(slow(*case) for case in rest)]
