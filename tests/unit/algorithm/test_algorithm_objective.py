"""The actor's objective: its terms by hand, and that no split of a batch changes any loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.choice import correction, policy_loss
from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs
from plimsoll.algorithm.policy_objective import (
    Aggregation,
    PolicyObjectiveInputs,
    PolicyTerms,
    aggregate,
    policy_objective,
)
from plimsoll.algorithm.ratios import KlEstimator
from plimsoll.algorithm.token_losses import value_loss
from plimsoll.config.base import Choice
from plimsoll.records import REFERENCE_LOGPROBS, SAMPLER_LOGPROBS, BatchCounts

torch.set_num_threads(1)

COUNTS = BatchCounts(tokens=4, sequences=2)
PLAIN = PolicyTerms(constant=8, kl_estimator="k2")
CLIP = policy_loss(Choice(name="clip"))
AGGREGATIONS: list[Aggregation] = ["tokens", "sequences", "constant"]


def two_tokens(
    reference: Sequence[float] | None = (-1.5, -1.0), sampler: Sequence[float] = (-1.0, -2.0)
) -> PolicyObjectiveInputs:
    """Two of a step's four tokens, one sequence of its two; advantages 1 and -2."""
    logprobs_L = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    policy = PolicyLossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=logprobs_L.detach(),
        advantages_L=torch.tensor([1.0, -2.0], dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, 2]),
        columns={SAMPLER_LOGPROBS: torch.tensor(sampler, dtype=torch.float64)}
        | (
            {}
            if reference is None
            else {REFERENCE_LOGPROBS: torch.tensor(reference, dtype=torch.float64)}
        ),
    )
    entropy_L = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    return PolicyObjectiveInputs(policy, entropy_L)


def gradient(inputs: PolicyObjectiveInputs, output: LossOutput) -> list[float]:
    [found] = torch.autograd.grad(output.loss, inputs.policy.logprobs_L)
    return found.tolist()


def test_objective_by_hand() -> None:
    inputs = two_tokens()
    terms = replace(PLAIN, kl_coefficient=0.1, entropy_bonus=0.01)
    output = policy_objective(inputs, COUNTS, terms, CLIP)
    # policy: -(1 - 2) / 4 = 0.25; k2: (0.5^2 + 1^2) / 2 / 4 = 0.15625; entropy: 1.2 / 4 = 0.3
    assert output.loss.item() == pytest.approx(0.25 + 0.1 * 0.15625 - 0.01 * 0.3)
    assert output.metrics["policy_loss"].item() == pytest.approx(0.25)
    assert output.metrics["kl_loss"].item() == pytest.approx(0.15625)
    assert output.metrics["entropy"].item() == pytest.approx(0.3)
    assert output.metrics["ratio"].item() == pytest.approx(2 / 4)
    assert output.metrics["mismatch/abs"].item() == 0
    assert "correction" not in output.metrics
    output.loss.backward()
    # -A / 4 from the policy loss, 0.1 * d / 4 from k2, with d = 0.5 and -1
    gradient = inputs.policy.logprobs_L.grad
    assert gradient is not None and inputs.entropy_L.grad is not None
    assert gradient.tolist() == pytest.approx([-0.25 + 0.0125, 0.5 - 0.025])
    assert inputs.entropy_L.grad.tolist() == pytest.approx([-0.01 / 4] * 2)


def test_without_reference_and_bonus_it_is_the_policy_loss_alone() -> None:
    inputs = two_tokens(reference=None)
    output = policy_objective(inputs, COUNTS, replace(PLAIN, kl_coefficient=9.0), CLIP)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.25)
    assert "kl_loss" not in output.metrics
    assert inputs.entropy_L.grad is None


def test_weights_of_a_correction_touch_the_policy_loss_alone() -> None:
    # trainer over sampler: e^-0.5 = 0.606531 (kept), and e^1 = 2.718282 (2 at most)
    inputs = two_tokens(sampler=(-0.5, -3.0))
    plain = replace(PLAIN, kl_coefficient=0.1, entropy_bonus=0.01)
    truncate = correction(Choice(name="truncate"))
    output = policy_objective(inputs, COUNTS, plain, CLIP, truncate)
    assert output.metrics["policy_loss"].item() == pytest.approx(-(0.606531 - 2 * 2) / 4)
    assert gradient(inputs, output) == pytest.approx(
        [-0.606531 / 4 + 0.0125, 2 * 2 / 4 - 0.025], abs=1e-6
    )
    without = policy_objective(inputs, COUNTS, plain, CLIP)
    for name in ("kl_loss", "entropy"):
        assert output.metrics[name] == without.metrics[name]
    difference = output.metrics["policy_loss"] - without.metrics["policy_loss"]
    assert (output.loss - without.loss).item() == pytest.approx(difference.item())
    [of_entropy] = torch.autograd.grad(output.loss, inputs.entropy_L)
    assert of_entropy.tolist() == pytest.approx([-0.01 / 4] * 2)
    assert output.metrics["correction"].item() == pytest.approx((0.606531 + 2) / 4)
    assert output.metrics["correction_zero"].item() == 0
    # |-0.5| + |1|; outside of 0.5 and 2: the second
    assert output.metrics["mismatch/abs"].item() == pytest.approx(1.5 / 4)
    assert output.metrics["mismatch/outside"].item() == pytest.approx(1 / 4)


def test_tokens_that_are_masked_learn_from_the_kl_alone() -> None:
    inputs = two_tokens(sampler=(-1.0, -4.0))
    masked = correction(Choice(name="mask", options={"level": "token", "high": 3.0}))
    output = policy_objective(inputs, COUNTS, PLAIN, CLIP, masked)
    assert gradient(inputs, output) == pytest.approx([-0.25, 0])
    assert output.metrics["correction_zero"].item() == pytest.approx(1 / 4)


def test_the_measured_mismatch_is_of_the_old_policy() -> None:
    """What the policy that learns has moved by since is the ratio's matter."""
    inputs = two_tokens(sampler=(-1.5, -2.0))
    moved = replace(inputs.policy, logprobs_L=torch.tensor([-0.1, -0.2], dtype=torch.float64))
    found = policy_objective(replace(inputs, policy=moved), COUNTS, PLAIN, CLIP).metrics
    assert found["mismatch/abs"].item() == pytest.approx(0.5 / 4)


# Sequences of 2, 0 and 1 tokens of a step with 5 tokens in 4 sequences, losses 1, 3 and 5:
#   tokens     (1 + 3 + 5) / 5
#   sequences  (2 + 0 + 5) / 4
#   constant   (1 + 3 + 5) / (4 * 10)
@pytest.mark.parametrize(
    ("aggregation", "expected", "gradient"),
    [
        ("tokens", 1.8, [0.2, 0.2, 0.2]),
        ("sequences", 1.75, [0.125, 0.125, 0.25]),
        ("constant", 0.225, [0.025, 0.025, 0.025]),
    ],
)
def test_aggregations_by_hand(
    aggregation: Aggregation, expected: float, gradient: list[float]
) -> None:
    x_L = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    counts = BatchCounts(tokens=5, sequences=4)
    found = aggregate(x_L, torch.tensor([0, 2, 2, 3]), counts, aggregation, constant=10)
    found.backward()
    assert found.item() == pytest.approx(expected)
    assert x_L.grad is not None and x_L.grad.tolist() == pytest.approx(gradient)


def test_kl_and_entropy_are_aggregated_as_the_loss_is_and_reported_by_token() -> None:
    inputs = two_tokens()
    terms = replace(PLAIN, aggregation="sequences", kl_coefficient=0.1, entropy_bonus=0.01)
    output = policy_objective(inputs, COUNTS, terms, CLIP)
    # means over the two tokens, over 2 sequences: 0.5, 0.625 / 2 and 0.6
    assert output.loss.item() == pytest.approx((0.5 + 0.1 * 0.3125 - 0.01 * 0.6) / 2)
    assert output.metrics["policy_loss"].item() == pytest.approx(0.25)
    assert output.metrics["kl_loss"].item() == pytest.approx(0.15625)


def test_metrics_carry_no_gradient() -> None:
    terms = replace(PLAIN, kl_coefficient=0.1, entropy_bonus=0.01, ratio_corrected=True)
    output = policy_objective(two_tokens(), COUNTS, terms, CLIP)
    assert not any(metric.requires_grad for metric in output.metrics.values())


@pytest.mark.parametrize("ratio_corrected", [False, True])
def test_gradcheck_of_the_objective(ratio_corrected: bool) -> None:
    old_L = torch.tensor([-1.1, -2.05], dtype=torch.float64)
    terms = replace(
        PLAIN,
        kl_estimator="k3",
        kl_coefficient=0.3,
        ratio_corrected=ratio_corrected,
        entropy_bonus=0.02,
    )
    leaves, truncate = two_tokens(sampler=(-1.2, -2.5)), correction(Choice(name="truncate"))

    def loss_of(logprobs_L: Tensor, entropy_L: Tensor) -> Tensor:
        policy = replace(leaves.policy, logprobs_L=logprobs_L, old_logprobs_L=old_L)
        inputs = replace(leaves, policy=policy, entropy_L=entropy_L)
        return policy_objective(inputs, COUNTS, terms, CLIP, truncate).loss

    assert torch.autograd.gradcheck(loss_of, (leaves.policy.logprobs_L, leaves.entropy_L))


# Two tokens with d = log policy - log reference of 0.5 and -1, and the ratios w = e^0.2 = 1.221403
# and e^-0.3 = 0.740818 to the old policy:
#   gradient of the KL, w d / 4 tokens      0.152675   -0.185205
#   w k1 = w d                              0.610701   -0.740818   sum / 4: -0.032529
#   w k2 = w d^2 / 2                        0.152675    0.370409            0.130771
#   w k3 = w (e^-d - 1 + d)                 0.130120    0.532113            0.165558
@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", -0.032529), ("k2", 0.130771), ("k3", 0.165558)]
)
def test_a_ratio_corrected_kl_by_hand(estimator: KlEstimator, value: float) -> None:
    inputs = two_tokens()
    nothing_L = torch.zeros(2, dtype=torch.float64)
    old_L = torch.tensor([-1.2, -1.7], dtype=torch.float64)
    policy = replace(inputs.policy, advantages_L=nothing_L, old_logprobs_L=old_L)
    inputs = replace(inputs, policy=policy)
    terms = replace(PLAIN, kl_estimator=estimator, kl_coefficient=0.1, ratio_corrected=True)
    output = policy_objective(inputs, COUNTS, terms, CLIP)
    assert output.metrics["kl_loss"].item() == pytest.approx(value, abs=1e-6)
    assert output.metrics["kl_clamped"].item() == 0
    assert output.loss.item() == pytest.approx(0.1 * value, abs=1e-7)
    assert gradient(inputs, output) == pytest.approx([0.0152675, -0.0185205], abs=1e-7)


def test_a_ratio_corrected_kl_of_equal_policies_has_no_gradient() -> None:
    """The derivative of w * k1, w * (d + 1), is 1 there: noise in place of nothing."""
    inputs = two_tokens(reference=(-1.0, -2.0))
    policy = replace(inputs.policy, advantages_L=torch.zeros(2, dtype=torch.float64))
    terms = replace(PLAIN, kl_estimator="k1", kl_coefficient=0.1, ratio_corrected=True)
    inputs = replace(inputs, policy=policy)
    assert gradient(inputs, policy_objective(inputs, COUNTS, terms, CLIP)) == [0, 0]


# Four tokens to choose from: the policy that learns, the one that sampled, the reference.
NOW = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
OLD = torch.tensor([-0.2, 0.4, 1.1, -0.6], dtype=torch.float64).log_softmax(0)
REFERENCE = torch.tensor([-0.5, 0.4, 0.9, -1.0], dtype=torch.float64).log_softmax(0)


def expected_kl_gradient(
    estimator: KlEstimator, old_V: Tensor | None, *, ratio_corrected: bool
) -> Tensor:
    """Of the objective's KL by the logits, the mean over what the old policy samples: each token is
    a sequence of its own, weighted with its probability. old_V: None: the policy that learns."""
    logits = NOW.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    old_V = logp_V.detach() if old_V is None else old_V
    terms = replace(
        PLAIN, kl_estimator=estimator, kl_coefficient=1.0, ratio_corrected=ratio_corrected
    )
    total = logits.sum() * 0
    for v, probability in enumerate(old_V.exp()):
        own = slice(v, v + 1)
        nothing_L = torch.zeros(1, dtype=torch.float64)
        columns = {SAMPLER_LOGPROBS: old_V[own], REFERENCE_LOGPROBS: REFERENCE[own]}
        ends = torch.tensor([0, 1])
        policy = PolicyLossInputs(logp_V[own], old_V[own], nothing_L, ends, columns)
        inputs = PolicyObjectiveInputs(policy, nothing_L)
        total = total + probability * policy_objective(inputs, BatchCounts(1, 1), terms, CLIP).loss
    [found] = torch.autograd.grad(total, logits)
    return found


def kl_gradient() -> Tensor:
    """Return the gradient of KL(policy || reference) itself."""
    logits = NOW.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    [found] = torch.autograd.grad((logp_V.exp() * (logp_V - REFERENCE)).sum(), logits)
    return found


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("old_V", [None, OLD], ids=["on-policy", "off-policy"])
def test_a_ratio_corrected_kl_has_the_gradient_of_the_kl(
    estimator: KlEstimator, old_V: Tensor | None
) -> None:
    found = expected_kl_gradient(estimator, old_V, ratio_corrected=True)
    torch.testing.assert_close(found, kl_gradient())


def test_without_the_correction_k1_holds_nothing_back_and_others_go_astray_off_policy() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(expected_kl_gradient("k1", None, ratio_corrected=False), zeros)
    on_policy = expected_kl_gradient("k2", None, ratio_corrected=False)
    torch.testing.assert_close(on_policy, kl_gradient())
    off_policy = expected_kl_gradient("k2", OLD, ratio_corrected=False)
    assert (off_policy - kl_gradient()).abs().max() > 0.05


# A micro-batch of a batch: its rows of columns_5L (the first learns) and its offsets.
Loss = Callable[[Tensor, Tensor, BatchCounts], LossOutput]


def _objective(policy: str, corrected: str | None, aggregation: Aggregation) -> Loss:
    chosen = policy_loss(Choice(name=policy))
    weigh = None if corrected is None else correction(Choice(name=corrected))
    terms = PolicyTerms(
        aggregation,
        constant=7,
        kl_estimator="k3",
        kl_coefficient=0.2,
        ratio_corrected=True,
        entropy_bonus=0.05,
    )

    def loss(columns_5L: Tensor, cu_loss_tokens: Tensor, counts: BatchCounts) -> LossOutput:
        logprobs_L, old_L, advantages_L, reference_L, sampler_L = columns_5L
        columns = {
            SAMPLER_LOGPROBS: sampler_L.detach(),
            REFERENCE_LOGPROBS: reference_L.detach(),
        }
        own = PolicyLossInputs(logprobs_L, old_L.detach(), advantages_L, cu_loss_tokens, columns)
        inputs = PolicyObjectiveInputs(own, logprobs_L.square())
        return policy_objective(inputs, counts, terms, chosen, weigh)

    return loss


def _value(columns_5L: Tensor, cu_loss_tokens: Tensor, counts: BatchCounts) -> LossOutput:
    values_L, old_L, returns_L, *_ = columns_5L
    return value_loss(values_L, old_L, returns_L, counts, clip=0.2)


def added(loss: Loss, columns_5L: Tensor, lengths: list[int], cuts: list[int]) -> list[Tensor]:
    """The sum of gradients, losses and metrics over the micro-batches between the cuts."""
    leaf_5L = columns_5L.clone().requires_grad_()
    offsets = [0, *itertools.accumulate(lengths)]
    counts = BatchCounts(tokens=offsets[-1], sequences=len(lengths))
    outputs = []
    for first, last in itertools.pairwise([0, *cuts, len(lengths)]):
        begin, end = offsets[first], offsets[last]
        cu_loss_tokens = torch.tensor(offsets[first : last + 1]) - begin
        output = loss(leaf_5L[:, begin:end], cu_loss_tokens, counts)
        output.loss.backward()
        outputs.append(output)
    assert leaf_5L.grad is not None
    names = outputs[0].metrics
    metrics = [torch.stack([o.metrics[name] for o in outputs]).sum() for name in names]
    return [leaf_5L.grad, torch.stack([o.loss.detach() for o in outputs]).sum(), *metrics]


POLICIES = [("clip", "truncate"), ("gspo", "mask"), ("cispo", "icepop"), ("sapo", None)]
LOSSES = {
    "value": _value,
    "dppo_tv-tokens": _objective("dppo_tv", None, "tokens"),
    **{
        f"{name}-{aggregation}": _objective(name, corrected, aggregation)
        for name, corrected in POLICIES
        for aggregation in AGGREGATIONS
    },
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=percent(30))
@given(data=st.data())
def test_any_split_into_micro_batches_adds_up_to_the_whole(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    columns_5L = torch.randn(5, sum(lengths), generator=generator, dtype=torch.float64)
    whole = added(LOSSES[name], columns_5L, lengths, cuts=[])
    for part, expected in zip(added(LOSSES[name], columns_5L, lengths, cuts), whole, strict=True):
        torch.testing.assert_close(part, expected)
