"""The ways of packed weights to engines, each between processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import get_context
from threading import Event, Thread
from typing import Any

import pytest
import torch
from buckets import CPU
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from plimsoll.errors import WeightSyncError
from plimsoll.sync.buckets import WeightBucket, ship_bucket, split_bytes, sum_pieces
from plimsoll.sync.channel import (
    CardInlet,
    CardOutlet,
    Channel,
    GroupOutlet,
    HostOutlet,
    HostRelay,
    Inlet,
    Outlet,
    _abort_when_over,
    _errors_end_only_groups,
    open_inlet,
    open_outlet,
)

LARGEST = 64
ROUNDS = 5
"""More buckets than an outlet has buffers."""


def tensors_of(number: int) -> dict[str, Tensor]:
    return {"a": torch.full((3,), number, dtype=torch.int8), "b": torch.arange(4.0) + number}


def receive(open_end: Callable[[], Inlet], connection: Any) -> None:
    """An engine's process: answers each bucket with what it read, or None if it is not for it."""
    inlet = open_end()
    while (bucket := connection.recv()) is not None:
        if not inlet.reaches(bucket.handle):
            connection.send(None)
            continue
        data = inlet.open(bucket.handle, bucket.bytes)
        pieces = {n: t.tolist() for n, t in split_bytes(bucket.tensors, data).items()}
        connection.send((pieces, sum_pieces(bucket.tensors, data)))
    inlet.close()
    connection.send("closed")


@contextmanager
def engines(*ends: Callable[[], Inlet]) -> Iterator[list[Any]]:
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in ends]
    processes = [
        context.Process(target=receive, args=(end, far))
        for end, (_, far) in zip(ends, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    yield [near for near, _ in pipes]
    for near, _ in pipes:
        near.send(None)
        assert near.poll(60) and near.recv() == "closed"
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def answer(connection: Any) -> Any:
    assert connection.poll(120)
    return connection.recv()


def check(bucket: WeightBucket, got: Any, number: int) -> None:
    pieces, sums = got
    assert pieces == {name: tensor.tolist() for name, tensor in tensors_of(number).items()}
    assert sums == [sent.checksum for sent in bucket.tensors]


class End:
    """Opens an inlet in the process that it is sent to."""

    def __init__(
        self,
        channel: Channel,
        number: int = 1,
        card: str | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.channel, self.number, self.card, self.device = channel, number, card, device

    def __call__(self) -> Inlet:
        if self.card is not None:
            return CardInlet(self.device, self.card)
        return open_inlet(self.channel, self.number, self.device)


def send_all(outlet: Outlet, connections: list[Any]) -> None:
    """The next bucket is packed before engines are asked for what they read of the last."""
    waiting = ship_bucket(tensors_of(0), outlet)
    for number in range(ROUNDS):
        for connection in connections:
            connection.send(waiting)
        last, waiting = waiting, ship_bucket(tensors_of(number + 1), outlet)
        for connection in connections:
            check(last, answer(connection), number)
    for connection in connections:
        connection.send(waiting)
        check(waiting, answer(connection), ROUNDS)


@pytest.mark.parametrize("near", [True, False])
def test_engines_read_host_memory_and_bytes_in_handles(near: bool) -> None:
    outlet, channel = open_outlet(Channel("host", LARGEST), CPU, near)
    with engines(End(channel), End(channel)) as connections:
        send_all(outlet, connections)
        outlet.close()
        send_all(outlet, connections)


def test_a_group_of_a_rank_and_two_engines_broadcasts() -> None:
    outlet, channel = open_outlet(Channel("nccl", LARGEST, "127.0.0.1", members=3), CPU, True)
    assert channel.port > 0
    with engines(End(channel, 1), End(channel, 2)) as connections:
        send_all(outlet, connections)
        outlet.close()
        send_all(outlet, connections)  # the next sync, in the same group
        outlet.close()


def test_each_engine_opens_the_memory_of_the_rank_on_its_card() -> None:
    """Shared tensors of torch.multiprocessing stand for two cards."""
    outlets = [CardOutlet(CPU, LARGEST, card) for card in ("first", "second")]
    ends = [End(Channel("ipc", LARGEST), card=card) for card in ("first", "second")]
    with engines(*ends) as connections:
        for number in range(ROUNDS):
            buckets = [
                ship_bucket(tensors_of(10 * place + number), o) for place, o in enumerate(outlets)
            ]
            for place, connection in enumerate(connections):
                for origin, bucket in enumerate(buckets):
                    connection.send(bucket)
                    got = answer(connection)
                    if origin == place:
                        check(bucket, got, 10 * place + number)
                    else:
                        assert got is None


def test_card_memory_is_made_anew_after_a_sync() -> None:
    outlet = CardOutlet(CPU, LARGEST, "card")
    first, second, third = (ship_bucket(tensors_of(i), outlet).handle for i in range(3))
    assert first != second and third == first  # two buffers, in turn
    outlet.close()
    assert ship_bucket(tensors_of(0), outlet).handle not in (first, second)


def test_host_memory_stays_for_the_next_sync() -> None:
    outlet = HostOutlet(CPU, LARGEST, near=True)
    paths = [ship_bucket(tensors_of(i), outlet).handle for i in range(4)]
    outlet.close()
    assert [ship_bucket(tensors_of(i), outlet).handle for i in range(2)] == paths[:2] == paths[2:]
    assert paths[0] != paths[1]


def test_an_engine_keeps_far_bytes_for_its_processes() -> None:
    relay, outlet = HostRelay(), HostOutlet(CPU, LARGEST, near=False)
    for largest in (8, LARGEST):  # as after a restart, when all weights go and not the trained ones
        relay.fit(largest)
    bucket = ship_bucket(tensors_of(3), outlet)
    handle = relay.forward(bucket.handle)
    data = open_inlet(Channel("host", LARGEST), 1, CPU).open(handle, bucket.bytes)
    assert isinstance(handle[0], str) and torch.equal(data, torch.from_numpy(bucket.handle[0]))
    assert relay.forward(handle) is handle
    assert relay.forward(("card", b"name")) == ("card", b"name")


def run_in_thread(call: Callable[[], object]) -> Future[object]:
    """Return the result of a call that may wait for ever, in a thread that ends with the test."""
    future: Future[object] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except WeightSyncError as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def test_a_rank_and_an_engine_are_freed_from_waiting_for_one_that_died() -> None:
    """It died before it joined: the third of three."""
    outlet, channel = open_outlet(Channel("nccl", LARGEST, "127.0.0.1", members=3), CPU, True)
    sending = run_in_thread(lambda: ship_bucket(tensors_of(0), outlet))
    joining = run_in_thread(End(channel, 1))
    with pytest.raises(TimeoutError):
        joining.result(1)
    assert not sending.done()
    outlet.break_off()  # as from the thread that answers beside the one that sends
    for waiting in (sending, joining):
        with pytest.raises(WeightSyncError, match="an engine has died"):
            waiting.result(60)
    outlet.drop()


class Group:
    """What an engine's thread asks of its group."""

    def __init__(self) -> None:
        self.abort_called = Event()
        self.abort = self.abort_called.set


def hold_store(connection: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


def test_an_engine_leaves_a_group_that_is_broken_off_or_whose_sender_has_died() -> None:
    """NCCL alone waits for members that are gone; so its groups are aborted."""
    outlet = GroupOutlet(CPU, "127.0.0.1", 2)
    context = get_context("spawn")
    near, far = context.Pipe()
    sender = context.Process(target=hold_store, args=(far,))
    sender.start()
    broken_off, died = Group(), Group()
    for group, port in ((broken_off, outlet.port), (died, answer(near))):
        bell = TCPStore("127.0.0.1", port, is_master=False)
        Thread(target=_abort_when_over, args=(bell, group), daemon=True).start()
    assert not broken_off.abort_called.wait(1) and not died.abort_called.is_set()
    outlet.break_off()
    sender.kill()
    assert broken_off.abort_called.wait(60) and died.abort_called.wait(60)


def test_a_group_that_is_broken_off_while_nobody_waits_does_no_harm() -> None:
    outlet, channel = open_outlet(Channel("nccl", LARGEST, "127.0.0.1", members=2), CPU, True)
    with engines(End(channel)) as connections:
        send_all(outlet, connections)
        outlet.close()
        outlet.break_off()
        outlet.drop()  # as when the next channel is opened


@pytest.mark.parametrize("before", [None, "3"])
def test_errors_end_groups_alone_only_where_channels_are_made(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _errors_end_only_groups():
        assert os.environ[name] == "2"  # CleanUpOnly
    assert os.environ.get(name) == before


def test_a_group_is_joined_by_all_or_not_at_all() -> None:
    outlet = GroupOutlet(CPU, "127.0.0.1", 2)
    outlet.room(8)
    assert not outlet._group.done()
    inlet = open_inlet(Channel("nccl", 8, "127.0.0.1", outlet.port, 2), 1, CPU)
    outlet.ship()
    assert torch.equal(inlet.open((), 8), outlet._sent[0][0])
