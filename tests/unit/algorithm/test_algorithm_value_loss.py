"""The value loss against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from plimsoll.algorithm.token_losses import value_loss
from plimsoll.records import BatchCounts

torch.set_num_threads(1)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BatchCounts]:
    # Three of the step's four tokens, clipped by 0.2:
    #   V  old  R   (V-R)^2  clipped V  (clipped-R)^2  max
    #   1  0.5  0   1        0.7        0.49           1
    #   2  0.5  3   1        0.7        5.29           5.29   clipped: no gradient
    #   0  0    1   1        0          1              1
    values_L = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    old_values_L = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    returns_L = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64)
    return values_L, old_values_L, returns_L, BatchCounts(tokens=4, sequences=2)


def test_hand_computed_with_clipping() -> None:
    given_inputs = inputs()
    output = value_loss(*given_inputs, clip=0.2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 7.29 / 4)
    assert given_inputs[0].grad is not None
    assert given_inputs[0].grad.tolist() == pytest.approx([1 / 4, 0, -1 / 4])
    assert output.metrics["value_mean"].item() == pytest.approx(3 / 4)
    assert output.metrics["value_clip_fraction"].item() == pytest.approx(1 / 4)
    assert output.metrics["value_error"].item() == pytest.approx(3 / 4)


def test_values_within_the_bounds_are_not_counted_as_clipped() -> None:
    """old + (V - old) is not V in float32, for many numbers."""
    generator = torch.Generator().manual_seed(0)
    old_L, values_L = torch.rand(2, 1000, generator=generator) / 5
    counts = BatchCounts(tokens=1000, sequences=1)
    output = value_loss(values_L, old_L, torch.zeros(1000), counts, clip=0.2)
    assert output.metrics["value_clip_fraction"].item() == 0


def test_hand_computed_without_clipping() -> None:
    given_inputs = inputs()
    output = value_loss(*given_inputs, clip=None)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 3 / 4)
    assert given_inputs[0].grad is not None
    assert given_inputs[0].grad.tolist() == pytest.approx([1 / 4, -1 / 4, -1 / 4])
    assert output.metrics["value_clip_fraction"].item() == 0


def test_gradcheck_away_from_the_kinks() -> None:
    _, old_values_L, returns_L, counts = inputs()

    def loss_of(values_L: torch.Tensor) -> torch.Tensor:
        return value_loss(values_L, old_values_L, returns_L, counts, clip=0.2).loss

    values_L = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss_of, (values_L,))
