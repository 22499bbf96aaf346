"""KTO's loss, its KL and its metrics against numbers computed by hand, and general properties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.choice import feedback_loss
from plimsoll.algorithm.feedback import kl_baseline
from plimsoll.algorithm.inputs import FeedbackLossInputs, LabelCounts, LossOutput
from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.choice import built_in_names

torch.set_num_threads(1)

# Three of the step's four responses, with beta 0.5 and z = 1: beta (r - z) = 1, 0 and -2.
LOGRATIOS = [3.0, 1.0, -3.0]
DESIRABLE = [True, True, False]
KL = 1.0
COUNTS = LabelCounts(desirable=2, undesirable=2)
SIGMOID_1, SIGMOID_2 = 0.7310586, 0.8807971


def doubles(values: list[float], *, learns: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=learns)


def compute(
    logratios_S: Tensor,
    desirable: list[bool],
    counts: LabelCounts,
    options: Mapping[str, OptionValue] = MappingProxyType({}),
    *,
    kl: float = KL,
) -> LossOutput:
    loss = feedback_loss(Choice(name="kto", options={"beta": 0.5, **options}))
    labels_S = torch.tensor(desirable, dtype=torch.bool)
    return loss(FeedbackLossInputs(logratios_S, labels_S, kl, counts))


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({}, (1 - SIGMOID_1) + 0.5 + (1 - SIGMOID_2)),
        (
            {"desirable_weight": 2.0, "undesirable_weight": 0.5},
            2 * (1 - SIGMOID_1) + 2 * 0.5 + 0.5 * (1 - SIGMOID_2),
        ),
        ({"undesirable_weight": 0.0}, (1 - SIGMOID_1) + 0.5),
    ],
)
def test_hand_computed(options: dict[str, OptionValue], total: float) -> None:
    output = compute(doubles(LOGRATIOS), DESIRABLE, COUNTS, options)
    assert output.loss.item() == pytest.approx(total / 4, abs=1e-7)


def test_every_loss_is_computed_by_hand_above() -> None:
    assert built_in_names("plimsoll.algorithm.feedback_loss") == ["kto"]


def test_the_gradient_by_hand() -> None:
    """-lambda_D beta s(1 - s) / 4 of a desirable response, the opposite of an undesirable one;
    metrics have none."""
    logratios_S = doubles(LOGRATIOS, learns=True)
    output = compute(logratios_S, DESIRABLE, COUNTS, {"desirable_weight": 2.0})
    assert not any(metric.requires_grad for metric in output.metrics.values())
    output.loss.backward()
    slopes = [SIGMOID_1 * (1 - SIGMOID_1), 0.25, SIGMOID_2 * (1 - SIGMOID_2)]
    expected = [-2 * 0.5 * slopes[0] / 4, -2 * 0.5 * slopes[1] / 4, 0.5 * slopes[2] / 4]
    assert logratios_S.grad is not None
    assert logratios_S.grad.tolist() == pytest.approx(expected, abs=1e-7)


def test_a_pair_is_pulled_apart() -> None:
    """Where policy and reference are the same, each is moved by beta / 4 of its share."""
    logratios_S = doubles([0.0, 0.0], learns=True)
    output = compute(logratios_S, [True, False], LabelCounts(1, 1), kl=0.0)
    output.loss.backward()
    assert output.loss.item() == 0.5
    assert logratios_S.grad is not None and logratios_S.grad.tolist() == [-0.0625, 0.0625]


def test_metrics_are_means_over_the_steps_responses_of_a_label() -> None:
    """beta 0.5: rewards 1.5 and 0.5 of two desirable ones, -1.5 of one of two undesirable ones."""
    output = compute(doubles(LOGRATIOS), DESIRABLE, COUNTS)
    assert {name: x.item() for name, x in output.metrics.items()} == pytest.approx(
        {
            "kl": 1.0 * 3 / 4,
            "rewards/desirable": 1.0,
            "rewards/undesirable": -0.75,
            "rewards/margin": 1.75,
        }
    )


@pytest.mark.parametrize(("label", "name"), [(True, "desirable"), (False, "undesirable")])
def test_a_label_that_a_step_lacks_has_no_mean(label: bool, name: str) -> None:
    counts = LabelCounts(2 * label, 2 * (not label))
    output = compute(doubles([1.0, 2.0]), [label, label], counts)
    assert set(output.metrics) == {"kl", f"rewards/{name}"}
    assert output.metrics[f"rewards/{name}"] == 0.75


@pytest.mark.parametrize(
    ("logratios", "kl"),
    [([1.0, 2.0, 6.0], 3.0), ([1.0, -2.0, -2.0], 0.0), ([0.0, 0.0], 0.0), ([-1.0, 2.0], 0.5)],
)
def test_the_kl_is_the_mean_or_nothing(logratios: list[float], kl: float) -> None:
    assert kl_baseline(doubles(logratios)) == kl


def test_gradients() -> None:
    logratios_S = torch.linspace(-9, 9, 8, dtype=torch.float64)
    labels = [bool(i % 3) for i in range(8)]

    def loss(logratios_S: Tensor) -> Tensor:
        return compute(logratios_S, labels, LabelCounts(5, 3), kl=0.7).loss

    assert torch.autograd.gradcheck(loss, logratios_S.requires_grad_())


@given(
    rows=st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=1, max_size=9),
    cut=st.integers(0, 9),
    kl=st.floats(0, 20),
)
def test_any_split_adds_up_to_the_whole(
    rows: list[tuple[float, bool]], cut: int, kl: float
) -> None:
    desirable = sum(label for _, label in rows)
    counts = LabelCounts(desirable, len(rows) - desirable)

    def of(part: list[tuple[float, bool]]) -> LossOutput:
        return compute(doubles([r for r, _ in part]), [label for _, label in part], counts, kl=kl)

    whole, halves = of(rows), [of(rows[:cut]), of(rows[cut:])]
    added = sum(half.loss.item() for half in halves)
    assert math.isclose(added, whole.loss.item(), abs_tol=1e-12)
    for name, value in whole.metrics.items():
        added = sum(half.metrics[name].item() for half in halves)
        assert added == pytest.approx(value.item(), rel=1e-6, abs=1e-6)


def test_a_filler_gives_nothing_but_a_gradient_of_zeros() -> None:
    """A rank that has no response still takes part in the backward pass."""
    filler_S = doubles([0.0], learns=True)
    output = compute(filler_S[:0], [], COUNTS)
    output.loss.backward()
    assert output.loss == 0 and filler_S.grad is not None and filler_S.grad.tolist() == [0.0]
