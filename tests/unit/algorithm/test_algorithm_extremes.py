"""Log-probs that are far apart: losses and gradients stay finite, and near ones are unchanged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.choice import correction, policy_loss, preference_loss
from plimsoll.algorithm.inputs import PairValues, PolicyLossInputs, PreferenceLossInputs, TokenLoss
from plimsoll.algorithm.policy_loss import cispo, clip, dppo_tv, gspo, sapo
from plimsoll.algorithm.policy_objective import (
    PolicyObjectiveInputs,
    PolicyTerms,
    policy_objective,
)
from plimsoll.algorithm.ratios import KlEstimator, is_clamped, kl, ratios
from plimsoll.config.base import Choice
from plimsoll.config.choice import built_in_names
from plimsoll.records import REFERENCE_LOGPROBS, SAMPLER_LOGPROBS, BatchCounts
from plimsoll.resolve.choices import needs_reference, needs_sampler

torch.set_num_threads(1)

POLICY_LOSSES = built_in_names("plimsoll.algorithm.policy_loss")
CORRECTIONS = [None, *built_in_names("plimsoll.algorithm.correction")]
PREFERENCE_LOSSES = built_in_names("plimsoll.algorithm.preference_loss")
ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]

LOGPROB = st.one_of(st.floats(-1e4, 0), st.sampled_from([0.0, -1.0, -90.0, -110.0, -1e4]))
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB, st.floats(-5, 5))
"""New, old, sampler's and reference's log-prob, and the advantage."""


def token(
    new: Sequence[float], old: Sequence[float], advantages: Sequence[float]
) -> PolicyLossInputs:
    """Each token is a sequence of its own; in float32, as in a run."""
    return PolicyLossInputs(
        torch.tensor(new).requires_grad_(),
        torch.tensor(old),
        torch.tensor(advantages),
        torch.arange(len(new) + 1),
    )


def gradient(inputs: PolicyLossInputs, output: TokenLoss) -> list[float]:
    assert all(x.isfinite().all() for x in [output.loss_L, *output.metrics.values()])
    [found] = torch.autograd.grad(output.loss_L.sum(), inputs.logprobs_L)
    return found.tolist()


# The log-ratio is 89, e^89 = 4.5e38 is over float32's 3.4e38. For A = 1 each loss is past its
# clip, so its gradient is 0 (CISPO: -1.2 A); DPPO leaves the token out, which went up by e^-1.
@pytest.mark.parametrize(
    ("loss", "expected"),
    [(clip, 0.0), (gspo, 0.0), (sapo, 0.0), (cispo, -1.2)],
    ids=["clip", "gspo", "sapo", "cispo"],
)
def test_a_ratio_over_the_range_of_float32_is_clipped_and_not_nan(
    loss: Callable[[PolicyLossInputs], TokenLoss], expected: float
) -> None:
    inputs = token([-1.0], [-90.0], [1.0])
    output = loss(inputs)
    assert gradient(inputs, output) == pytest.approx([expected])
    assert output.metrics["ratio_clamped"].tolist() == [1]


def test_a_token_that_dppo_leaves_out_has_no_ratio_to_overflow() -> None:
    inputs = token([-1.0], [-1.0], [1.0])
    output = dppo_tv(inputs, torch.tensor([-90.0]), penalty=0.0)
    assert gradient(inputs, output) == [0]
    assert output.metrics["ratio_clamped"].tolist() == [1]


def test_a_bad_token_beyond_the_bound_is_left_out_of_the_step_and_dual_clip_does_so_earlier() -> (
    None
):
    """PPO's clip does not hold where A < 0 and the ratio is high: up to e^20 the gradient is -A
    times the ratio, and from there on 0."""
    inputs = token([-1.0, -1.0], [-20.0, -22.0], [-1.0, -1.0])
    output = clip(inputs)
    assert gradient(inputs, output) == pytest.approx([math.exp(19), 0])
    assert output.metrics["ratio_clamped"].tolist() == [0, 1]
    dual = clip(inputs, dual_clip=3.0)
    assert gradient(inputs, dual) == [0, 0]


def test_gspo_clamps_the_mean_of_a_sequence_and_not_its_tokens() -> None:
    """Log-ratios 30 and -30 have the mean 0: s is 1, and each token has half of the gradient."""
    given_inputs = PolicyLossInputs(
        torch.tensor([-1.0, -31.0]).requires_grad_(),
        torch.tensor([-31.0, -1.0]),
        torch.tensor([2.0, 2.0]),
        torch.tensor([0, 2]),
    )
    output = gspo(given_inputs)
    assert gradient(given_inputs, output) == pytest.approx([-2.0, -2.0])
    assert output.metrics["ratio_clamped"].tolist() == [0, 0]


def objective(
    tokens: Sequence[tuple[float, ...]],
    policy: str,
    corrected: str | None,
    estimator: KlEstimator,
    *,
    ratio_corrected: bool,
) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient by the log-probs. Sequences of two tokens."""
    new, old, sampler, reference, advantages = map(torch.tensor, zip(*tokens, strict=True))
    ends = [*range(0, len(tokens), 2), len(tokens)]
    columns = {SAMPLER_LOGPROBS: sampler, REFERENCE_LOGPROBS: reference}
    own = PolicyLossInputs(new.requires_grad_(), old, advantages, torch.tensor(ends), columns)
    inputs = PolicyObjectiveInputs(own, torch.zeros(len(tokens)))
    terms = PolicyTerms(kl_estimator=estimator, kl_coefficient=0.1, ratio_corrected=ratio_corrected)
    output = policy_objective(
        inputs,
        BatchCounts(len(tokens), len(ends) - 1),
        terms,
        policy_loss(Choice(name=policy)),
        None if corrected is None else correction(Choice(name=corrected)),
    )
    assert all(metric.isfinite() for metric in output.metrics.values())
    [found] = torch.autograd.grad(output.loss, own.logprobs_L)
    return output.loss, found


TOGETHER = [
    (policy, corrected, estimator)
    for policy, corrected, estimator in itertools.product(POLICY_LOSSES, CORRECTIONS, ESTIMATORS)
    if corrected is None or not needs_sampler(Choice(name=policy))
]


@pytest.mark.parametrize(("policy", "corrected", "estimator"), TOGETHER)
@settings(max_examples=percent(15))
@given(tokens=st.lists(TOKEN, min_size=1, max_size=5), ratio_corrected=st.booleans())
def test_the_objective_and_its_gradient_are_finite_however_far_apart_the_policies_are(
    policy: str,
    corrected: str | None,
    estimator: KlEstimator,
    tokens: list[tuple[float, ...]],
    ratio_corrected: bool,
) -> None:
    loss, found = objective(tokens, policy, corrected, estimator, ratio_corrected=ratio_corrected)
    assert loss.isfinite() and found.isfinite().all()


NEAR = st.tuples(*[st.floats(-9, 0)] * 4, st.floats(-5, 5))
"""Log-ratios of up to 9, so that a sequence of two tokens has one of up to 18."""


@pytest.mark.parametrize(("policy", "corrected", "estimator"), TOGETHER)
@settings(max_examples=percent(6))
@given(tokens=st.lists(NEAR, min_size=1, max_size=5), ratio_corrected=st.booleans())
def test_policies_that_are_near_have_the_gradient_that_they_have_without_a_bound(
    policy: str,
    corrected: str | None,
    estimator: KlEstimator,
    tokens: list[tuple[float, ...]],
    ratio_corrected: bool,
) -> None:
    found = objective(tokens, policy, corrected, estimator, ratio_corrected=ratio_corrected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plimsoll.algorithm.ratios.LARGEST", math.inf)
        plain = objective(tokens, policy, corrected, estimator, ratio_corrected=ratio_corrected)
    assert all(map(torch.equal, found, plain))


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=5))
def test_ratios_within_the_bound_are_plain_exponentials(logratios: list[float]) -> None:
    logratio_L = torch.tensor(logratios, dtype=torch.float64, requires_grad=True)
    found, plain = ratios(logratio_L), logratio_L.exp()
    assert torch.equal(found, plain) and not is_clamped(logratio_L).any()
    [by_found] = torch.autograd.grad(found.sum(), logratio_L)
    assert torch.equal(by_found, plain)


@given(st.lists(st.floats(20.001, 1e4), min_size=1, max_size=5), st.sampled_from([-1, 1]))
def test_ratios_beyond_the_bound_are_counted_and_have_no_gradient(
    logratios: list[float], sign: int
) -> None:
    logratio_L = sign * torch.tensor(logratios, dtype=torch.float64)
    found = ratios(logratio_L.requires_grad_())
    assert found.tolist() == pytest.approx([math.exp(sign * 20)] * len(logratios))
    assert is_clamped(logratio_L).all()
    [by_found] = torch.autograd.grad(found.sum(), logratio_L)
    assert not by_found.any()


# The estimate k3 of d = log policy - log reference, and its gradient 1 - e^-d:
#   d    k3                     gradient
#   25   25 - 1 + 1.4e-11       1     what has moved furthest is held back
#   -19  e^19 - 20              1 - e^19
#   -90  e^20 - 21, as at -20   0     in place of -e^90, which float32 has not
def test_k3_is_bounded_only_where_it_overflows() -> None:
    policy_L = torch.tensor([-1.0, -20.0, -91.0], requires_grad=True)
    reference_L = torch.tensor([-26.0, -1.0, -1.0])
    found = kl(policy_L, reference_L, "k3")
    assert found.tolist() == pytest.approx([24, math.exp(19) - 20, math.exp(20) - 21])
    [by_policy] = torch.autograd.grad(found.sum(), policy_L)
    assert by_policy.tolist() == pytest.approx([1, 1 - math.exp(19), 0])


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@given(
    logprobs=st.lists(st.tuples(*[st.floats(-1e4, 0)] * 4), min_size=1, max_size=4),
    length=st.integers(1, 100),
)
def test_preference_losses_need_no_bound(
    name: str, logprobs: list[tuple[float, ...]], length: int
) -> None:
    """They take log-ratios through a log-sigmoid, which does not overflow."""
    chosen, rejected, *of_reference = map(torch.tensor, zip(*logprobs, strict=True))
    for learned in (chosen, rejected):
        learned.requires_grad_()
    lengths_P = torch.full_like(chosen, length)
    inputs = PreferenceLossInputs(
        PairValues(chosen, rejected), PairValues(lengths_P, lengths_P), len(logprobs)
    )
    choice = Choice(name=name)
    reference = [PairValues(*of_reference)] if needs_reference(choice) else []
    output = preference_loss(choice)(inputs, *reference)
    found = torch.autograd.grad(output.loss, (chosen, rejected))
    assert output.loss.isfinite() and all(x.isfinite().all() for x in found)
