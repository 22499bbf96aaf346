"""What the micro-batches of a step add up to, and when their numbers are read."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.data.packing import pack_one
from plimsoll.model.policy import PackTensors
from plimsoll.records import Sample
from plimsoll.trainer.objectives import Shares, _add_shares, _totals, score


def test_shares_are_added_by_name() -> None:
    shares: Shares = {}
    for loss, accuracy in ((1.5, 0.25), (2.0, 0.5)):
        output = LossOutput(torch.tensor(loss), {"accuracy": torch.tensor(accuracy)})
        _add_shares(shares, output)
    assert _totals(shares) == {"loss": 3.5, "accuracy": 0.75}


def test_numbers_are_not_read_between_micro_batches() -> None:
    """On a card that waits; a tensor without a value shows it, as it cannot be read."""
    shares: Shares = {}
    weight = torch.ones((), device="meta", requires_grad=True)
    _add_shares(shares, LossOutput(2 * weight, {"kl": torch.zeros((), device="meta")}))
    (loss,) = shares["loss"]
    assert isinstance(loss, torch.Tensor) and not loss.requires_grad  # nor its graph kept


PACKS = [pack_one([Sample(np.arange(n), np.arange(n) > 0)], [0]) for n in (4, 2, 7)]
SCORING: Any = SimpleNamespace(scoring=nullcontext)


def test_scores_come_in_the_order_of_the_packs() -> None:
    def forward(pack: PackTensors) -> Tensor:
        return pack.targets_L.bfloat16() / 4

    found = score(SCORING, PACKS, forward, torch.device("cpu"))
    assert [scores.tolist() for scores in found] == [
        [0.25, 0.5, 0.75],
        [0.25],
        [0.25, 0.5, 0.75, 1.0, 1.25, 1.5],
    ]
    assert {scores.dtype for scores in found} == {np.dtype(np.float32)}


def test_scores_are_not_read_between_packs() -> None:
    """On a card that waits, and a tensor without a value cannot be read."""
    scored: list[int] = []

    def forward(pack: PackTensors) -> Tensor:
        scored.append(len(pack.targets_L))
        return torch.zeros(len(pack.targets_L), device="meta")

    with pytest.raises(NotImplementedError, match="meta"):
        score(SCORING, PACKS, forward, torch.device("cpu"))
    assert scored == [3, 1, 6]
