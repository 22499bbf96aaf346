"""The moving average against its definition, and exchanging it with the weights."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from plimsoll.trainer.zero.masters import Average


def test_the_average_by_hand() -> None:
    """The decay is 2/11, 3/12, then 0.26, which 4/13 would exceed."""
    average = Average([torch.tensor([11.0])], decay=0.26)
    average.add([torch.tensor([0.0])], updates=1)
    assert average.rows[0].item() == pytest.approx(2.0)  # 11 x 2/11
    average.add([torch.tensor([6.0])], updates=2)
    assert average.rows[0].item() == pytest.approx(5.0)  # 2 x 1/4 + 6 x 3/4
    average.add([torch.tensor([5.0])], updates=3)
    average.add([torch.tensor([15.0])], updates=4)
    assert average.rows[0].item() == pytest.approx(12.4)  # 5 x 0.26 + 15 x 0.74


def test_it_is_apart_from_the_weights() -> None:
    master = torch.tensor([1.0, 2.0])
    average = Average([master], decay=0.999)
    master.zero_()
    average.add([master], updates=10**6)
    assert average.rows[0].tolist() == pytest.approx([0.999, 1.998])


@patch("plimsoll.trainer.zero.masters._PIECE", 2)
def test_swapped_twice_is_as_before() -> None:
    masters = [torch.arange(5.0), torch.arange(3.0)]
    average = Average(masters, decay=0.5)
    for master in masters:
        master.add_(10)
    average.swap(masters)
    assert masters[0].tolist() == [0, 1, 2, 3, 4] and average.rows[1].tolist() == [10, 11, 12]
    average.swap(masters)
    assert masters[1].tolist() == [10, 11, 12] and average.rows[0].tolist() == [0, 1, 2, 3, 4]
