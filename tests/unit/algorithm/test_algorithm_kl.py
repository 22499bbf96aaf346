"""KL estimators against exact expectations over a small vocabulary, and the coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.ratios import KlEstimator, adapt, kl
from plimsoll.errors import PlimsollError

torch.set_num_threads(1)

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.9, -1.0], dtype=torch.float64).log_softmax(0)


def test_hand_computed() -> None:
    # d = ln 2 and -ln 2: k3 is 1/2 - 1 + ln 2 and 2 - 1 - ln 2
    policy_L = torch.tensor([-1.0, -1.0 - math.log(2)], dtype=torch.float64)
    reference_L = torch.tensor([-1.0 - math.log(2), -1.0], dtype=torch.float64)
    ln2 = math.log(2)
    assert kl(policy_L, reference_L, "k1").tolist() == pytest.approx([ln2, -ln2])
    assert kl(policy_L, reference_L, "k2").tolist() == pytest.approx([ln2**2 / 2, ln2**2 / 2])
    assert kl(policy_L, reference_L, "k3").tolist() == pytest.approx([ln2 - 0.5, 1 - ln2])


def true_kl(logp_V: torch.Tensor, logq_V: torch.Tensor) -> torch.Tensor:
    return (logp_V.exp() * (logp_V - logq_V)).sum()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_expectation_over_the_policy(estimator: KlEstimator, unbiased: bool) -> None:
    logp_V = LOGITS.log_softmax(0)
    expected = (logp_V.exp() * kl(logp_V, REFERENCE, estimator)).sum().item()
    truth = true_kl(logp_V, REFERENCE).item()
    assert (expected == pytest.approx(truth)) is unbiased


def expected_gradient(estimator: KlEstimator) -> torch.Tensor:
    """What the gradient of the estimator in a loss is, on average over the policy's samples."""
    logits = LOGITS.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    (logp_V.exp().detach() * kl(logp_V, REFERENCE, estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def true_gradient(reverse: bool) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    (true_kl(REFERENCE, logp_V) if reverse else true_kl(logp_V, REFERENCE)).backward()
    assert logits.grad is not None
    return logits.grad


def test_gradients_in_a_loss_are_what_the_docstring_says() -> None:
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2"), true_gradient(reverse=False))
    torch.testing.assert_close(expected_gradient("k3"), true_gradient(reverse=True))


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    policy_L, reference_L = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    assert (kl(policy_L, reference_L, "k2") >= 0).all()
    assert (kl(policy_L, reference_L, "k3") >= 0).all()


@given(st.floats(-30, 0), st.sampled_from(["k1", "k2", "k3"]))
def test_equal_policies_have_no_kl(logprob: float, estimator: KlEstimator) -> None:
    logprobs_L = torch.tensor([logprob])
    assert kl(logprobs_L, logprobs_L.clone(), estimator).item() == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck(estimator: KlEstimator) -> None:
    logprobs_L = torch.tensor([-1.0, -2.5, -0.1], dtype=torch.float64, requires_grad=True)
    reference_L = torch.tensor([-1.5, -2.0, -0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl(x, reference_L, estimator), (logprobs_L,))


def test_adaptive_coefficient_by_hand() -> None:
    # 9 / 6 - 1 = 0.5, clipped to 0.2: 0.1 * (1 + 0.2 * 256 / 10000)
    assert adapt(0.1, 9.0, 256, 6.0, 10_000) == pytest.approx(0.100512)
    # 5.7 / 6 - 1 = -0.05: 0.1 * (1 - 0.05 * 256 / 10000)
    assert adapt(0.1, 5.7, 256, 6.0, 10_000) == pytest.approx(0.099872)
    # a step larger than the horizon counts as one horizon: 0.1 * (1 - 0.2)
    assert adapt(0.1, -3.0, 256, 6.0, 10) == pytest.approx(0.08)


@given(
    coefficient=st.floats(1e-6, 10),
    observed=st.floats(-100, 100),
    responses=st.integers(1, 10_000),
    target=st.floats(0.01, 50),
    horizon=st.integers(1, 100_000),
)
def test_the_coefficient_moves_towards_the_target_and_stays_positive(
    coefficient: float, observed: float, responses: int, target: float, horizon: int
) -> None:
    found = adapt(coefficient, observed, responses, target, horizon)
    assert found > 0
    assert found >= coefficient if observed >= target else found <= coefficient


@pytest.mark.parametrize("observed", [math.nan, math.inf])
def test_a_kl_that_is_no_number_stops_the_run(observed: float) -> None:
    with pytest.raises(PlimsollError, match=f"KL from the reference is {observed}"):
        adapt(0.1, observed, 256, 6.0, 10_000)
