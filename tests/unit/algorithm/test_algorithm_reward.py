"""Reward losses, centring, process loss and calibration, against numbers computed by hand."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.choice import reward_loss
from plimsoll.algorithm.figures import calibrate, calibrate_pairs, sigmoid
from plimsoll.algorithm.inputs import LossOutput, PairValues, RewardLossInputs
from plimsoll.algorithm.preference import preference_output, reward_objective
from plimsoll.algorithm.token_losses import process_loss
from plimsoll.config.base import Choice
from plimsoll.config.choice import built_in_names
from plimsoll.errors import ConfigError
from plimsoll.records import BatchCounts

torch.set_num_threads(1)

NAMES = built_in_names("plimsoll.algorithm.reward_loss")
PAIRS = 4
CHOSEN, REJECTED = [2.0, -1.0], [1.0, 0.5]
"""Two of the step's four pairs: 1 ahead, 1.5 behind."""
SCORES = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12)


def doubles(values: list[float], *, learns: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=learns)


def compute(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    margins: list[float],
    centring: float = 0.0,
    pairs: int = PAIRS,
) -> LossOutput:
    inputs = RewardLossInputs(PairValues(chosen, rejected), doubles(margins), pairs)
    return reward_objective(inputs, reward_loss(Choice(name=name)), centring)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("margins", "centring", "total"),
    [
        # ln(1 + e^-1) + ln(1 + e^1.5)
        ([0.0, 0.0], 0.0, 0.3132617 + 1.7014133),
        # ahead of the margin by 0.5 and -3.5: ln(1 + e^-0.5) + ln(1 + e^3.5)
        ([0.5, 2.0], 0.0, 0.4740770 + 3.5297504),
        # sums of the two scores: 3 and -0.5, squared 9 and 0.25
        ([0.0, 0.0], 0.1, 0.3132617 + 1.7014133 + 0.1 * 9.25),
    ],
)
def test_hand_computed(name: str, margins: list[float], centring: float, total: float) -> None:
    output = compute(name, doubles(CHOSEN), doubles(REJECTED), margins, centring)
    assert output.loss.item() == pytest.approx(total / PAIRS, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_means_over_the_steps_pairs(name: str) -> None:
    """The margin changes what is asked for, not who is ahead."""
    output = compute(name, doubles(CHOSEN), doubles(REJECTED), [5.0, 5.0], 0.1)
    assert {metric: x.item() for metric, x in output.metrics.items()} == pytest.approx(
        {
            "accuracy": 1 / 4,
            "rewards/margin": (1 - 1.5) / 4,
            "rewards/chosen": (2 - 1) / 4,
            "rewards/rejected": (1 + 0.5) / 4,
            "off_centre": 9.25 / 4,
            "reward_loss": output.loss.item() - 0.1 * 9.25 / 4,
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_by_hand(name: str) -> None:
    """-sigmoid(m - ahead) / 4 on the chosen score, and 2 * 0.1 * sum / 4 of the centring; metrics
    have none."""
    chosen = doubles(CHOSEN, learns=True)
    output = compute(name, chosen, doubles(REJECTED), [0.5, 0.0], 0.1)
    assert not any(metric.requires_grad for metric in output.metrics.values())
    output.loss.backward()
    assert chosen.grad is not None
    expected = [(-0.3775407 + 0.2 * 3) / 4, (-0.8175745 - 0.2 * 0.5) / 4]
    assert chosen.grad.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_scores_far_apart_have_a_finite_loss(name: str) -> None:
    """Where exp alone overflows."""
    chosen = doubles([-1000.0, 1000.0], learns=True)
    output = compute(name, chosen, doubles([1000.0, -1000.0]), [0.0, 0.0], pairs=2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1000.0)
    assert chosen.grad is not None and chosen.grad.tolist() == [-0.5, 0.0]


@given(SCORES)
def test_a_split_into_micro_batches_changes_nothing(scores: list[float]) -> None:
    pairs = len(scores) // 2
    chosen, rejected = doubles(scores[:pairs]), doubles(scores[pairs : 2 * pairs])
    margins = [0.1 * i for i in range(pairs)]
    whole = compute("log_sigmoid", chosen, rejected, margins, 0.3, pairs)
    cut = pairs // 2
    parts = [
        compute("log_sigmoid", chosen[s], rejected[s], margins[s], 0.3, pairs)
        for s in (slice(0, cut), slice(cut, None))
    ]
    assert float(sum(p.loss for p in parts)) == pytest.approx(whole.loss.item())
    for metric, value in whole.metrics.items():
        assert float(sum(p.metrics[metric] for p in parts)) == pytest.approx(value.item())


def hinge(inputs: RewardLossInputs, *, width: float = 1.0) -> LossOutput:
    """A loss of one's own."""
    losses_P = torch.relu(width - inputs.scores.margin_P)
    return preference_output(losses_P, inputs.scores, inputs.pairs)


def two(inputs: RewardLossInputs, reference: PairValues) -> None:
    """Takes what no reward loss is given."""


def test_a_loss_of_ones_own_by_import_path() -> None:
    chosen = reward_loss(Choice(name=f"{__name__}:hinge", options={"width": 2.0}))
    inputs = RewardLossInputs(PairValues(doubles(CHOSEN), doubles(REJECTED)), doubles([0, 0]), 2)
    assert chosen(inputs).loss.item() == pytest.approx((1 + 3.5) / 2)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(name="log_sigmod"), "log_sigmoid"),
        (Choice(name="log_exp", options={"beta": 1.0}), "no option 'beta'"),
        (Choice(name=f"{__name__}:two"), "take 1 positional argument"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_loss(choice)


def test_the_process_loss_by_hand() -> None:
    """Right with 2, wrong with -1, half right with 0: ln(1 + e^-2), ln(1 + e^-1), ln 2."""
    scores = doubles([2.0, -1.0, 0.0], learns=True)
    output = process_loss(scores, doubles([1.0, 0.0, 0.5]), BatchCounts(tokens=6, sequences=2))
    assert output.loss.item() == pytest.approx((0.1269280 + 0.3132617 + 0.6931472) / 6, abs=1e-7)
    assert output.metrics["accuracy"].item() == pytest.approx(3 / 6)
    assert output.metrics["labels"].item() == pytest.approx(1.5 / 6)
    output.loss.backward()
    assert scores.grad is not None
    expected = [(0.8807971 - 1) / 6, 0.2689414 / 6, 0.0]  # (sigmoid(r) - l) / 6
    assert scores.grad.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("score", "label"), [(1.0, 0.4), (-1.0, 0.6), (0.0, 1.0)])
def test_a_score_on_the_labels_other_side_is_wrong(score: float, label: float) -> None:
    output = process_loss(doubles([score]), doubles([label]), BatchCounts(1, 1))
    assert output.metrics["accuracy"] == 0


def test_calibration_by_hand() -> None:
    """Three in the bin from 0.7 to 0.8, one in that from 0.1, and 1 itself in the last."""
    found = calibrate(
        np.array([0.7, 0.75, 0.79, 0.1, 1.0], dtype=np.float32),
        np.array([1, 0, 0, 0.5, 1], dtype=np.float32),
    )
    assert found.counts_K.tolist() == [1, 3, 1]
    assert found.predicted_K.tolist() == pytest.approx([0.1, 2.24 / 3, 1.0])
    assert found.observed_K.tolist() == pytest.approx([0.5, 1 / 3, 1.0])
    assert found.error == pytest.approx((0.4 + abs(2.24 - 1)) / 5)


def test_pairs_count_in_both_orders() -> None:
    """Two pairs that are 1 ahead, one that is 1 behind: at 0.731, two of three come true."""
    found = calibrate_pairs(np.array([1, 1, -1], dtype=np.float32))
    assert found.counts_K.tolist() == [3, 3]
    assert found.predicted_K.tolist() == pytest.approx([0.2689414, 0.7310586])
    assert found.observed_K.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert found.error == pytest.approx(0.7310586 - 2 / 3)


@given(SCORES)
def test_every_prediction_is_in_a_bin_and_both_orders_mirror(scores: list[float]) -> None:
    found = calibrate_pairs(np.array(scores, dtype=np.float32))
    assert found.counts_K.sum() == 2 * len(scores)
    assert 0 <= found.error <= 1
    mean = functools.partial(np.average, weights=found.counts_K)
    assert mean(found.predicted_K) == pytest.approx(0.5, abs=1e-5)
    assert mean(found.observed_K) == pytest.approx(0.5, abs=1e-5)


def test_predictions_that_come_true_have_no_error() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 2, 200_000).astype(np.float32)
    ahead = np.where(rng.random(len(scores)) < sigmoid(scores), scores, -scores)
    assert calibrate_pairs(ahead).error < 0.01
    assert calibrate_pairs(3 * ahead).error > 0.05  # far too sure


def test_far_scores_have_probabilities_without_overflow() -> None:
    with np.errstate(all="raise"):
        found = sigmoid(np.array([-500, 0, 500], dtype=np.float32))
    assert found.tolist() == [0.0, 0.5, 1.0]
