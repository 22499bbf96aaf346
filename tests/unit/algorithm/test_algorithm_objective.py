"""The actor's objective and the loss of SFT; and that no split of a batch changes any loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs, ValueLossInputs
from plimsoll.algorithm.policy_loss.clip import loss as clip_loss
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs, policy_objective
from plimsoll.algorithm.value_loss import value_loss
from plimsoll.records import BatchCounts

torch.set_num_threads(1)


def objective_inputs(
    logprobs_L: Tensor, old_L: Tensor, entropy_L: Tensor, reference_L: Tensor | None, tokens: int
) -> PolicyObjectiveInputs:
    policy = PolicyLossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=old_L,
        advantages_L=torch.tensor([1.0, -2.0], dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, 2]),
        counts=BatchCounts(tokens=tokens, sequences=2),
    )
    return PolicyObjectiveInputs(policy, entropy_L, reference_L)


def two_tokens(reference: bool) -> PolicyObjectiveInputs:
    logprobs_L = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropy_L = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    reference_L = torch.tensor([-1.5, -1.0], dtype=torch.float64) if reference else None
    return objective_inputs(logprobs_L, logprobs_L.detach(), entropy_L, reference_L, tokens=4)


def test_objective_by_hand() -> None:
    inputs = two_tokens(reference=True)
    output = policy_objective(inputs, clip_loss, "k2", kl_coefficient=0.1, entropy_bonus=0.01)
    # policy: -(1 - 2) / 4 = 0.25; k2: (0.5^2 + 1^2) / 2 / 4 = 0.15625; entropy: 1.2 / 4 = 0.3
    assert output.loss.item() == pytest.approx(0.25 + 0.1 * 0.15625 - 0.01 * 0.3)
    assert output.metrics["policy_loss"].item() == pytest.approx(0.25)
    assert output.metrics["kl_loss"].item() == pytest.approx(0.15625)
    assert output.metrics["entropy"].item() == pytest.approx(0.3)
    assert output.metrics["ratio"].item() == pytest.approx(2 / 4)
    output.loss.backward()
    # -A / 4 from the policy loss, 0.1 * d / 4 from k2, with d = 0.5 and -1
    gradient = inputs.policy.logprobs_L.grad
    assert gradient is not None and inputs.entropy_L.grad is not None
    assert gradient.tolist() == pytest.approx([-0.25 + 0.0125, 0.5 - 0.025])
    assert inputs.entropy_L.grad.tolist() == pytest.approx([-0.01 / 4] * 2)


def test_without_reference_and_bonus_it_is_the_policy_loss_alone() -> None:
    inputs = two_tokens(reference=False)
    output = policy_objective(inputs, clip_loss, "k3", kl_coefficient=9.0, entropy_bonus=0.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.25)
    assert "kl_loss" not in output.metrics
    assert inputs.entropy_L.grad is None


def test_metrics_carry_no_gradient() -> None:
    output = policy_objective(two_tokens(reference=True), clip_loss, "k3", 0.1, 0.01)
    assert not any(metric.requires_grad for metric in output.metrics.values())


def test_gradcheck_of_the_objective() -> None:
    old_L = torch.tensor([-1.1, -2.05], dtype=torch.float64)
    reference_L = torch.tensor([-1.5, -1.0], dtype=torch.float64)

    def loss_of(logprobs_L: Tensor, entropy_L: Tensor) -> Tensor:
        inputs = objective_inputs(logprobs_L, old_L, entropy_L, reference_L, tokens=4)
        return policy_objective(inputs, clip_loss, "k3", 0.3, 0.02).loss

    leaves = two_tokens(reference=False)
    assert torch.autograd.gradcheck(loss_of, (leaves.policy.logprobs_L, leaves.entropy_L))


# A micro-batch of a batch: its rows of columns_4L (the first learns) and its offsets.
Loss = Callable[[Tensor, Tensor, BatchCounts], LossOutput]


def _objective(columns_4L: Tensor, cu_loss_tokens: Tensor, counts: BatchCounts) -> LossOutput:
    logprobs_L, old_L, advantages_L, reference_L = columns_4L
    policy = PolicyLossInputs(logprobs_L, old_L, advantages_L, cu_loss_tokens, counts)
    inputs = PolicyObjectiveInputs(policy, logprobs_L.square(), reference_L)
    return policy_objective(inputs, clip_loss, "k3", kl_coefficient=0.2, entropy_bonus=0.05)


def _value(columns_4L: Tensor, cu_loss_tokens: Tensor, counts: BatchCounts) -> LossOutput:
    values_L, old_L, returns_L, _ = columns_4L
    return value_loss(ValueLossInputs(values_L, old_L, returns_L, counts), clip=0.2)


def added(loss: Loss, columns_4L: Tensor, lengths: list[int], cuts: list[int]) -> list[Tensor]:
    """The sum of gradients, losses and metrics over the micro-batches between the cuts."""
    leaf_4L = columns_4L.clone().requires_grad_()
    offsets = [0, *itertools.accumulate(lengths)]
    counts = BatchCounts(tokens=offsets[-1], sequences=len(lengths))
    outputs = []
    for first, last in itertools.pairwise([0, *cuts, len(lengths)]):
        begin, end = offsets[first], offsets[last]
        cu_loss_tokens = torch.tensor(offsets[first : last + 1]) - begin
        output = loss(leaf_4L[:, begin:end], cu_loss_tokens, counts)
        output.loss.backward()
        outputs.append(output)
    assert leaf_4L.grad is not None
    names = outputs[0].metrics
    metrics = [torch.stack([o.metrics[name] for o in outputs]).sum() for name in names]
    return [leaf_4L.grad, torch.stack([o.loss.detach() for o in outputs]).sum(), *metrics]


@pytest.mark.parametrize("loss", [_objective, _value])
@given(data=st.data())
def test_any_split_into_micro_batches_adds_up_to_the_whole(loss: Loss, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    columns_4L = torch.randn(4, sum(lengths), generator=generator, dtype=torch.float64)
    whole = added(loss, columns_4L, lengths, cuts=[])
    for part, expected in zip(added(loss, columns_4L, lengths, cuts), whole, strict=True):
        torch.testing.assert_close(part, expected)
