"""The helper that runs functions on ranks: a failing rank is shown, and nothing hangs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, RankProcesses

from plimsoll.machine.host import free_port
from plimsoll.trainer.process_group import Place, join, leave


def sum_of_ranks(place: Place, times: int) -> tuple[int, float]:
    join(place)
    number = torch.tensor(float(place.rank + 1) * times)
    dist.all_reduce(number)
    return place.rank, number.item()


def fail_on_rank_one(place: Place) -> None:
    """The other rank waits for what never comes."""
    join(place)
    if place.rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def test_a_rank_that_fails_is_shown_and_the_next_call_works(two_ranks: RankProcesses) -> None:
    assert two_ranks.run(sum_of_ranks, 10) == [(0, 30.0), (1, 30.0)]
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 wrote last:.*ValueError: rank one says no"):
        two_ranks.run(fail_on_rank_one)
    assert time.monotonic() - began < 120  # far under the patience for a rank that is stuck
    assert two_ranks.run(sum_of_ranks, 1) == [(0, 3.0), (1, 3.0)]


def test_a_process_may_leave_and_join_others() -> None:
    for _ in range(2):
        join(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
        number = torch.tensor(3.0)
        dist.all_reduce(number)
        leave()
        assert number.item() == 3 and not dist.is_initialized()
