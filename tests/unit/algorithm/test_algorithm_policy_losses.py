"""The policy losses besides PPO's clip: numbers worked out by hand, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss
from plimsoll.algorithm.policy_loss import cispo, clip, dppo_tv, gspo, reinforce, sapo
from plimsoll.algorithm.sequences import means

torch.set_num_threads(1)


def inputs(
    ratios: Sequence[float], advantages: Sequence[float], lengths: Sequence[int] | None = None
) -> PolicyLossInputs:
    """Old log-probs from -3 to -1."""
    old_L = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    return PolicyLossInputs(
        logprobs_L=(old_L + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs_L=old_L,
        advantages_L=torch.tensor(advantages, dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, *itertools.accumulate(lengths or [len(ratios)])]),
    )


def gradient(given_inputs: PolicyLossInputs, output: TokenLoss) -> list[float]:
    """Return the gradient of the sum over tokens."""
    [found] = torch.autograd.grad(output.loss_L.sum(), given_inputs.logprobs_L)
    return found.tolist()


def test_reinforce_by_hand() -> None:
    # log-probs -3, -2, -1
    given_inputs = inputs([1.0, 1.0, 1.0], [2.0, -1.0, 0.5])
    output = reinforce(given_inputs)
    assert output.loss_L.tolist() == pytest.approx([6.0, -2.0, 0.5]) and output.metrics == {}
    assert gradient(given_inputs, output) == pytest.approx([-2.0, 1.0, -0.5])


# CISPO, ratios and A as below, the weight w within 0.8 and 1.2, and the gradient -w A:
#   ratio  A   w     -w A
#   1.5    1   1.2   -1.2   clipped, and learned from all the same
#   0.5   -1   0.8    0.8   clipped
#   1.1    2   1.1   -2.2
#   7.0   -1   1.2    1.2   clipped
RATIOS, ADVANTAGES = [1.5, 0.5, 1.1, 7.0], [1.0, -1.0, 2.0, -1.0]


def test_cispo_by_hand() -> None:
    given_inputs = inputs(RATIOS, ADVANTAGES)
    output = cispo(given_inputs)
    assert gradient(given_inputs, output) == pytest.approx([-1.2, 0.8, -2.2, 1.2])
    logprobs = given_inputs.logprobs_L.tolist()
    expected = [-1.2 * logprobs[0], 0.8 * logprobs[1], -2.2 * logprobs[2], 1.2 * logprobs[3]]
    assert output.loss_L.tolist() == pytest.approx(expected)
    assert output.metrics["clip_fraction"].tolist() == [1, 1, 0, 1]
    assert output.metrics["ratio"].tolist() == pytest.approx(RATIOS)


def test_cispo_with_an_absolute_cap_has_no_lower_bound() -> None:
    given_inputs = inputs(RATIOS, ADVANTAGES)
    output = cispo(given_inputs, clip_low=0.1, clip_high=0.1, cap=5.0)
    assert gradient(given_inputs, output) == pytest.approx([-1.5, 0.5, -2.2, 5.0])
    assert output.metrics["clip_fraction"].tolist() == [0, 0, 0, 1]


RATIO = st.floats(0.05, 10)
TOKENS = st.lists(st.tuples(RATIO, st.floats(-5, 5)), min_size=1, max_size=6)


@given(TOKENS, st.floats(0, 1), st.floats(0, 3), st.none() | st.floats(0.5, 5))
def test_the_gradient_of_cispo_is_minus_w_a(
    tokens: list[tuple[float, float]], low: float, high: float, cap: float | None
) -> None:
    given_inputs = inputs(*zip(*tokens, strict=True))
    found = gradient(given_inputs, cispo(given_inputs, clip_low=low, clip_high=high, cap=cap))
    weights = [
        max(1 - low, min(1 + high, ratio)) if cap is None else min(cap, ratio)
        for ratio, _ in tokens
    ]
    expected = [-w * a for w, (_, a) in zip(weights, tokens, strict=True)]
    assert found == pytest.approx(expected, abs=1e-9)


# SAPO: x = tau (ratio - 1), the loss -(4 / tau) sigmoid(x) A, its gradient -4 s (1 - s) ratio A:
#   ratio  A   tau   x      s          loss       gradient
#   1      1   1     0      0.5       -2         -1
#   2      1   1     1      0.731059  -2.924234  -4 * 0.196612 * 2 = -1.572896
#   1     -2   1.05  0      0.5        3.809524   2
#   3     -1   1.05  2.1    0.890903   3.393917   4 * 0.097195 * 3 = 1.166336
def test_sapo_by_hand() -> None:
    given_inputs = inputs([1.0, 2.0, 1.0, 3.0], [1.0, 1.0, -2.0, -1.0])
    output = sapo(given_inputs)
    assert output.loss_L.tolist() == pytest.approx([-2, -2.924234, 3.809524, 3.393917], abs=1e-6)
    found = gradient(given_inputs, output)
    assert found == pytest.approx([-1, -1.572896, 2, 1.166336], abs=5e-6)


def test_sapo_takes_the_tau_of_good_tokens_where_the_advantage_is_zero_or_more() -> None:
    given_inputs = inputs([2.0, 2.0], [1.0, -1.0])
    found = sapo(given_inputs, tau_positive=2.0, tau_negative=4.0).loss_L.tolist()
    sigmoid = [1 / (1 + math.exp(-x)) for x in (2, 4)]
    assert found == pytest.approx([-2 * sigmoid[0], sigmoid[1]])


# DPPO, by direction, with the threshold 0.2 and without a penalty:
#   sampler  now   A    moved   left out
#   0.3      0.6   1    +0.3    yes: it went up, and would go on up
#   0.3      0.6  -1    +0.3    no: it would come back
#   0.6      0.3  -1    -0.3    yes
#   0.6      0.3   1    -0.3    no
#   0.5      0.6   1    +0.1    no
SAMPLED = [0.3, 0.3, 0.6, 0.6, 0.5]
NOW = [0.6, 0.6, 0.3, 0.3, 0.6]


def moved(advantages: Sequence[float]) -> tuple[PolicyLossInputs, Tensor]:
    sampler_L = torch.tensor(SAMPLED, dtype=torch.float64).log()
    given_inputs = PolicyLossInputs(
        torch.tensor(NOW, dtype=torch.float64).log().requires_grad_(),
        torch.tensor([0.4] * 5, dtype=torch.float64).log(),  # the old policy: of no matter
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor([0, 5]),
    )
    return given_inputs, sampler_L


def test_dppo_by_hand() -> None:
    given_inputs, sampler_L = moved([1.0, -1.0, -1.0, 1.0, 1.0])
    output = dppo_tv(given_inputs, sampler_L, penalty=0.0)
    assert output.loss_L.tolist() == pytest.approx([0, 2, 0, -0.5, -1.2])
    assert gradient(given_inputs, output) == pytest.approx([0, 2, 0, -0.5, -1.2])
    assert output.metrics["clip_fraction"].tolist() == [1, 0, 1, 0, 0]
    assert output.metrics["ratio"].tolist() == pytest.approx([1.5, 1.5, 0.75, 0.75, 1.5])
    wide = dppo_tv(given_inputs, sampler_L, threshold=0.31, penalty=0.0)
    assert not wide.metrics["clip_fraction"].any()


def test_the_penalty_of_dppo_is_of_every_token() -> None:
    given_inputs, sampler_L = moved([1.0, -1.0, -1.0, 1.0, 1.0])
    plain = dppo_tv(given_inputs, sampler_L, penalty=0.0)
    output = dppo_tv(given_inputs, sampler_L, penalty=0.1)
    log_ratios = [math.log(now / before) for now, before in zip(NOW, SAMPLED, strict=True)]
    less = (output.loss_L - plain.loss_L).tolist()
    assert less == pytest.approx([0.1 * x**2 for x in log_ratios])
    assert gradient(given_inputs, output)[0] == pytest.approx(0.2 * math.log(2))


def test_a_probability_of_dppo_may_rise_further_than_fall() -> None:
    """0.3 up passes 0.31, and 0.3 down does not pass 0.29."""
    given_inputs, sampler_L = moved([1.0, -1.0, -1.0, 1.0, 1.0])
    output = dppo_tv(given_inputs, sampler_L, threshold=0.31, threshold_low=0.29)
    assert output.metrics["clip_fraction"].tolist() == [0, 0, 1, 0, 0]
    output = dppo_tv(given_inputs, sampler_L, threshold=0.29, threshold_low=0.31)
    assert output.metrics["clip_fraction"].tolist() == [1, 0, 0, 0, 0]


def test_the_cap_of_dppo_bounds_weights_and_keeps_gradients() -> None:
    """Ratios are 2, 2, 0.5, 0.5 and 1.2, the gradient -A min(ratio, 1.5), of those left out 0."""
    given_inputs, sampler_L = moved([1.0, -1.0, -1.0, 1.0, 1.0])
    output = dppo_tv(given_inputs, sampler_L, cap=1.5, penalty=0.0)
    assert gradient(given_inputs, output) == pytest.approx([0, 1.5, 0, -0.5, -1.2])
    assert output.loss_L.tolist() == pytest.approx([0, 1.5, 0, -0.5, -1.2])


# GSPO: two sequences of 2 and 1 tokens with the log-ratios 0.3, -0.1 and -0.2, so s = e^0.1 =
# 1.105171 and e^-0.2 = 0.818731. Within 0.85 and 1.15 the second is clipped.
#   A   s         clipped   min(s A, clipped A)
#   2   1.105171  1.105171  2.210342, at both tokens
#  -1   0.818731  0.85     -0.85
def two_sequences(advantages: Sequence[float]) -> PolicyLossInputs:
    ratios = [math.exp(x) for x in (0.3, -0.1, -0.2)]
    return inputs(ratios, advantages, lengths=[2, 0, 1])


def test_gspo_by_hand() -> None:
    given_inputs = two_sequences([2.0, 2.0, -1.0])
    output = gspo(given_inputs, clip_low=0.15, clip_high=0.15)
    assert output.loss_L.tolist() == pytest.approx([-2.210342, -2.210342, 0.85], abs=1e-6)
    assert output.metrics["clip_fraction"].tolist() == [0, 0, 1]
    # each token of two has half of each of the two terms' gradient s A
    found = gradient(given_inputs, output)
    assert found == pytest.approx([-2.210342, -2.210342, 0], abs=1e-6)


def test_gspo_of_tokens_whose_advantages_differ_by_hand() -> None:
    """Advantages differ where the KL is in the reward. s = e^0.1 = 1.105171 is of both tokens, and
    so is what each loses by it: -s (2 - 1) / 2 = -0.552585."""
    given_inputs = two_sequences([2.0, -1.0, 0.0])
    output = gspo(given_inputs, clip_low=0.15, clip_high=0.15)
    assert output.loss_L.tolist() == pytest.approx([-2.210342, 1.105171, 0], abs=1e-6)
    assert gradient(given_inputs, output) == pytest.approx([-0.552585, -0.552585, 0], abs=1e-6)


def gspo_token(given_inputs: PolicyLossInputs, low: float, high: float) -> Tensor:
    """The paper's equation 14: s with its gradient stopped, times the token's probability over
    itself stopped; the mean over each sequence's tokens."""
    logprobs_L, old_L, advantages_L = (
        given_inputs.logprobs_L,
        given_inputs.old_logprobs_L,
        given_inputs.advantages_L,
    )
    losses = []
    for begin, end in itertools.pairwise(given_inputs.cu_loss_tokens.tolist()):
        if begin == end:
            continue
        own = slice(begin, end)
        s = (logprobs_L[own] - old_L[own]).mean().exp().detach()
        s_t = s * (logprobs_L[own] - logprobs_L[own].detach()).exp()
        bounded = s_t.clamp(1 - low, 1 + high)
        terms = torch.minimum(s_t * advantages_L[own], bounded * advantages_L[own])
        losses.append(-terms.mean())
    return torch.stack(losses).sum()


SEQUENCES = st.lists(
    st.tuples(st.lists(st.floats(0.2, 5), max_size=4), st.floats(-5, 5)), min_size=1, max_size=4
).filter(lambda batch: any(ratios for ratios, _ in batch))


@given(SEQUENCES, st.floats(0.001, 0.5), st.floats(0.001, 0.5))
def test_the_gradient_of_gspo_is_that_of_the_papers_token_form(
    batch: list[tuple[list[float], float]], low: float, high: float
) -> None:
    """Where the advantages of a sequence are all the same."""
    ratios = [ratio for own, _ in batch for ratio in own]
    advantages = [a for own, a in batch for _ in own]
    given_inputs = inputs(ratios, advantages, [len(own) for own, _ in batch])
    output = gspo(given_inputs, clip_low=low, clip_high=high)
    of_sequences = means(output.loss_L, given_inputs.cu_loss_tokens).sum()
    want = gspo_token(given_inputs, low, high)
    assert of_sequences.item() == pytest.approx(want.item(), abs=1e-9)
    [found_L] = torch.autograd.grad(of_sequences, given_inputs.logprobs_L)
    [want_L] = torch.autograd.grad(want, given_inputs.logprobs_L)
    torch.testing.assert_close(found_L, want_L)


@given(TOKENS)
def test_of_one_token_gspo_is_clip(tokens: list[tuple[float, float]]) -> None:
    ratios, advantages = zip(*tokens, strict=True)
    given_inputs = inputs(ratios, advantages, [1] * len(tokens))
    found, want = gspo(given_inputs), clip(given_inputs, clip_low=3e-4, clip_high=4e-4)
    torch.testing.assert_close(found.loss_L, want.loss_L)
    torch.testing.assert_close(gradient(given_inputs, found), gradient(given_inputs, want))


LOSSES = {"cispo": cispo, "gspo": gspo, "sapo": sapo, "reinforce": reinforce}


@pytest.mark.parametrize("name", [*LOSSES, "dppo_tv"])
@given(advantages=st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_a_ratio_of_one_is_the_plain_policy_gradient(name: str, advantages: list[float]) -> None:
    """Also where the tokens of a sequence differ in what GSPO has the mean of."""
    given_inputs = inputs([1.0] * len(advantages), advantages, [1] * len(advantages))
    old_L = given_inputs.old_logprobs_L
    output = dppo_tv(given_inputs, old_L) if name == "dppo_tv" else LOSSES[name](given_inputs)
    found = gradient(given_inputs, output)
    assert found == pytest.approx([-a for a in advantages], abs=1e-9)


@pytest.mark.parametrize("name", [*LOSSES, "dppo_tv"])
def test_a_micro_batch_without_learned_tokens_has_a_gradient(name: str) -> None:
    empty = inputs([], [], [0, 0])
    sampler_L = torch.zeros(0, dtype=torch.float64)
    output = dppo_tv(empty, sampler_L) if name == "dppo_tv" else LOSSES[name](empty)
    assert gradient(empty, output) == []
    assert all(metric.shape == (0,) for metric in output.metrics.values())
