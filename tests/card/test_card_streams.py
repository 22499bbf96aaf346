"""What the card of host memory says of streams, copies, allocations and devices."""

from __future__ import annotations

import pytest
import torch
from fakecard.control import catching_races, fail_at, set_capacity, stat

CARD = torch.device("cuda", 0)


def use_on_another_stream(*, waits: bool, records: bool) -> list[str]:
    """Read a tensor on a stream of its own, and drop it; return the races."""
    stream = torch.cuda.Stream()
    with catching_races() as races:
        tensor = torch.ones(1000, device=CARD)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            total = tensor.sum()
        if records:
            tensor.record_stream(stream)
        if waits:
            torch.cuda.current_stream().wait_stream(stream)
        del tensor
        stream.synchronize()
    assert total.item() == 1000
    return races


def test_memory_may_go_once_its_users_are_over_or_recorded() -> None:
    assert use_on_another_stream(waits=True, records=False) == []
    assert use_on_another_stream(waits=False, records=True) == []
    [race] = use_on_another_stream(waits=False, records=False)
    assert "is freed while aten::sum" in race


def test_the_backward_pass_waits_for_the_forward_pass_on_another_stream() -> None:
    """Autograd runs it in its own thread, and on the stream of the forward pass."""
    stream = torch.cuda.Stream()
    weight = torch.ones(10, device=CARD, requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with catching_races() as races:
        with torch.cuda.stream(stream):
            loss = (weight * 3).sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        assert weight.grad is not None and weight.grad.tolist() == [3.0] * 10
    assert races == []


def test_an_upload_takes_the_bytes_that_its_source_has_when_the_card_comes_to_it() -> None:
    source = torch.ones(100, pin_memory=True)
    early = source.to(CARD, non_blocking=True)
    source.fill_(2)
    assert early.tolist() == [2.0] * 100
    kept = source.to(CARD, non_blocking=True)
    torch.cuda.synchronize()
    source.fill_(3)
    assert kept.tolist() == [2.0] * 100


def test_an_allocation_fails_by_its_number_or_by_the_cards_size() -> None:
    fail_at(1, least=2**20)
    kept = [torch.empty(size, dtype=torch.uint8, device=CARD) for size in (2**20, 2**10)]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 MiB"):
        torch.empty(2**20, dtype=torch.uint8, device=CARD)
    room = stat("capacity")
    try:
        set_capacity(stat("allocated") + 2**20)
        kept.append(torch.empty(2**20, dtype=torch.uint8, device=CARD))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, device=CARD)
    finally:
        set_capacity(room)


def test_bytes_come_back_and_pinned_ones_are_counted() -> None:
    before, pinned = stat("allocated"), stat("pinned")
    kept = torch.empty(2**20, dtype=torch.uint8, device=CARD), torch.empty(100, pin_memory=True)
    assert stat("allocated") - before == 2**20 and stat("pinned") - pinned == 512
    del kept
    assert (stat("allocated"), stat("pinned")) == (before, pinned)


def test_tensors_of_two_devices_do_not_mix() -> None:
    on_card = torch.randn(3, device=CARD)
    assert torch.equal(on_card * torch.tensor(2.0), on_card + on_card)  # a number of the CPU may
    for other in (torch.randn(3), torch.randn(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="on the same device"):
            on_card * other
