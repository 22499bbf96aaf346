"""Corrections for sampler against trainer, and the mismatch of the two, worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.correction import icepop, mask, truncate
from plimsoll.algorithm.inputs import CorrectionInputs
from plimsoll.algorithm.ratios import mismatch_metrics, sampler_ratios
from plimsoll.config.base import RatioLevel

torch.set_num_threads(1)

# Sequences of 2, 0, 1 and 3 tokens; the trainer's probability over the sampler's at each:
#   tokens        product   geometric mean
#   4, 0.25       1         1
#   -             -         -
#   0.4           0.4       0.4
#   2, 2, 2       8         2
RATIOS = [4.0, 0.25, 0.4, 2.0, 2.0, 2.0]
LENGTHS = [2, 0, 1, 3]


def inputs(ratios: Sequence[float], lengths: Sequence[int]) -> CorrectionInputs:
    return CorrectionInputs(
        torch.tensor(ratios, dtype=torch.float64).log(),
        torch.tensor([0, *itertools.accumulate(lengths)]),
    )


GIVEN = inputs(RATIOS, LENGTHS)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", RATIOS),
        ("sequence", [1, 1, 0.4, 8, 8, 8]),
        ("geometric", [1, 1, 0.4, 2, 2, 2]),
    ],
)
def test_ratios_by_hand(level: RatioLevel, expected: list[float]) -> None:
    assert sampler_ratios(GIVEN, level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2, 0.25, 0.4, 2, 2, 2]),
        ("sequence", [1, 1, 0.4, 2, 2, 2]),
        ("geometric", [1, 1, 0.4, 2, 2, 2]),
    ],
)
def test_truncated_weights_by_hand(level: RatioLevel, expected: list[float]) -> None:
    assert truncate(GIVEN, level=level).weights_L.tolist() == pytest.approx(expected)


def test_the_bound_of_truncation_is_an_option() -> None:
    found = truncate(GIVEN, high=3.0).weights_L.tolist()
    assert found == pytest.approx([3, 0.25, 0.4, 2, 2, 2])


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.3, 3.0, [0, 0, 0.4, 2, 2, 2]),
        ("sequence", 0.0, 3.0, [1, 1, 0.4, 0, 0, 0]),
        ("sequence", 0.5, 9.0, [1, 1, 0, 8, 8, 8]),
        ("geometric", 0.5, 3.0, [1, 1, 0, 2, 2, 2]),
    ],
)
def test_masked_weights_by_hand(
    level: RatioLevel, low: float, high: float, expected: list[float]
) -> None:
    found = mask(GIVEN, level=level, low=low, high=high).weights_L.tolist()
    assert found == pytest.approx(expected)


def test_what_is_kept_may_be_of_another_level() -> None:
    """Sequences are let through by their geometric mean, and each token keeps its own weight."""
    found = mask(GIVEN, level="geometric", low=0.5, high=5.0, kept="token").weights_L
    assert found.tolist() == pytest.approx([4, 0.25, 0, 2, 2, 2])


def test_icepop_by_hand() -> None:
    assert icepop(GIVEN).weights_L.tolist() == pytest.approx([4, 0, 0, 2, 2, 2])
    found = icepop(GIVEN, low=0.3, high=3.0).weights_L.tolist()
    assert found == pytest.approx([0, 0, 0.4, 2, 2, 2])


def test_the_bounds_belong_to_the_band() -> None:
    exact = inputs([1.0, 1.0], [1, 1])
    assert mask(exact, level="token", low=1.0, high=1.0).weights_L.tolist() == [1, 1]


def test_a_product_drifts_with_length_and_a_geometric_mean_does_not() -> None:
    """A thousand tokens, each e^0.002 likelier: e^2 = 7.4 for the product."""
    drifting = inputs([math.exp(0.002)] * 1000, [1000])
    assert not mask(drifting).weights_L.any()
    found = mask(drifting, level="geometric").weights_L.tolist()
    assert found == pytest.approx([math.exp(0.002)] * 1000)


def test_no_sequence_is_too_far_away_for_a_number() -> None:
    far = CorrectionInputs(torch.tensor([-1e4, 1e4, math.inf, -math.inf]), torch.arange(5))
    for level in ("token", "sequence", "geometric"):
        assert sampler_ratios(far, level).isfinite().all()
        assert truncate(far, level=level).weights_L.isfinite().all()
    found = mismatch_metrics(far)
    assert all(x.isfinite().all() for x in found.values())
    assert found["mismatch/clamped"].tolist() == [1, 1, 1, 1]


# trainer over sampler, its logarithm, k3 = ratio - 1 - logarithm, outside of 0.5 and 2:
#   1      0          0           0
#   2      0.693147   0.306853    0
#   0.4   -0.916291   0.316291    1
#   e^1.5  1.5        1.981689    1
def test_mismatch_by_hand() -> None:
    found = mismatch_metrics(inputs([1.0, 2.0, 0.4, math.exp(1.5)], [4]))
    assert found["mismatch/abs"].tolist() == pytest.approx([0, 0.693147, 0.916291, 1.5], abs=1e-6)
    k3 = [0, 0.306853, 0.316291, 1.981689]
    assert found["mismatch/k3"].tolist() == pytest.approx(k3, abs=1e-6)
    assert found["mismatch/outside"].tolist() == [0, 0, 1, 1]
    assert found["mismatch/clamped"].tolist() == [0, 0, 0, 0]


def test_k3_of_the_mismatch_is_the_kl_of_the_sampler_from_the_trainer() -> None:
    """Its expectation over the sampler's tokens, exactly."""
    sampler_V = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    trainer_V = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    given_inputs = CorrectionInputs((trainer_V / sampler_V).log(), torch.tensor([0, 3]))
    found = (sampler_V * mismatch_metrics(given_inputs)["mismatch/k3"]).sum()
    assert found.item() == pytest.approx((sampler_V * (sampler_V / trainer_V).log()).sum().item())


BATCH = st.lists(st.lists(st.floats(0.1, 8), max_size=4), min_size=1, max_size=5)


@given(BATCH, st.floats(0, 1), st.floats(1, 5))
def test_equals_the_plain_loop(batch: list[list[float]], low: float, high: float) -> None:
    given_inputs = inputs([r for own in batch for r in own], [len(own) for own in batch])
    of_level: dict[RatioLevel, list[float]] = {"token": [], "sequence": [], "geometric": []}
    for own in batch:
        of_level["token"] += own
        of_level["sequence"] += [math.prod(own)] * len(own)
        of_level["geometric"] += [math.prod(own) ** (1 / max(1, len(own)))] * len(own)
    for level, ratios in of_level.items():
        near = any(abs(r - bound) < 1e-9 for r in ratios for bound in (low, high))
        cut = truncate(given_inputs, level=level, high=high).weights_L.tolist()
        assert cut == pytest.approx([min(r, high) for r in ratios])
        masked = mask(given_inputs, level=level, low=low, high=high).weights_L.tolist()
        assert near or masked == pytest.approx([r if low <= r <= high else 0 for r in ratios])
