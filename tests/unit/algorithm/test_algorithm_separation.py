"""The separation of two groups by scores: against counting pairs, and the interval's coverage."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.figures import separation_interval, share_ahead

GROUP = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(GROUP, GROUP)
def test_it_is_the_share_of_pairs_and_a_tie_counts_half(
    better: list[float], worse: list[float]
) -> None:
    counted = [(a > b) + (a == b) / 2 for a in better for b in worse]
    found = share_ahead(np.array(better, dtype=np.float32), np.array(worse, dtype=np.float32))
    assert found == pytest.approx(sum(counted) / len(counted))


@given(st.floats(0, 1), st.integers(1, 300), st.integers(1, 300))
def test_the_interval_holds_the_share_and_stays_a_share(
    share: float, better: int, worse: int
) -> None:
    low, high = separation_interval(share, better, worse)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    assert high - low > 1e-3
    mirrored = separation_interval(1 - share, worse, better)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-6)


@pytest.mark.parametrize(("better", "worse", "ahead"), [(10, 10, 1.0), (30, 10, 2.0), (8, 60, 0)])
def test_it_holds_the_truth_in_about_95_of_100_experiments(
    better: int, worse: int, ahead: float
) -> None:
    """Normal scores, `ahead` standard deviations apart, whose share is known."""
    rng, truth = np.random.default_rng(0), NormalDist().cdf(ahead / 2**0.5)
    held = []
    for _ in range(400):
        groups = rng.normal(ahead, 1, better), rng.normal(0, 1, worse)
        share = share_ahead(*(group.astype(np.float32) for group in groups))
        low, high = separation_interval(share, better, worse)
        held.append(low <= truth <= high)
    assert 0.93 <= np.mean(held) <= 0.99
