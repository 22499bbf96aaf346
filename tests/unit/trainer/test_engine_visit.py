"""A frozen role's weights visit the device while it scores, and are at home otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plimsoll.trainer.zero.frozen import _visit


def shift(home: Tensor) -> Tensor:
    """Another tensor, told from the one at home by its values."""
    return home + 1


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_away_within_and_untouched_at_home_after(fails: bool) -> None:
    module = nn.Linear(3, 2)
    homes = [p.data_ptr() for p in module.parameters()]
    values = [p.detach().clone() for p in module.parameters()]
    try:
        with _visit(list(module.parameters()), shift):
            away = [p.detach().clone() for p in module.parameters()]
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        pass
    assert [p.data_ptr() for p in module.parameters()] == homes
    for parameter, value, visitor in zip(module.parameters(), values, away, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
        torch.testing.assert_close(visitor, value + 1, rtol=0, atol=0)
