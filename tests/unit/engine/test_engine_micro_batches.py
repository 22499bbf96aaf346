"""What the micro-batches of a step add up to, and when their numbers are read."""

from __future__ import annotations

import torch

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.engine.micro_batches import Shares, _note, _totals


def test_shares_are_added_by_name() -> None:
    shares: Shares = {}
    for loss, accuracy in ((1.5, 0.25), (2.0, 0.5)):
        output = LossOutput(torch.tensor(loss), {"accuracy": torch.tensor(accuracy)})
        _note(shares, output)
    assert _totals(shares) == {"loss": 3.5, "accuracy": 0.75}


def test_numbers_are_not_read_between_micro_batches() -> None:
    """On a card that waits; a tensor without a value shows it, as it cannot be read."""
    shares: Shares = {}
    weight = torch.ones((), device="meta", requires_grad=True)
    _note(shares, LossOutput(2 * weight, {"kl": torch.zeros((), device="meta")}))
    (loss,) = shares["loss"]
    assert isinstance(loss, torch.Tensor) and not loss.requires_grad  # nor its graph kept
