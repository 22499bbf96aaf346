"""The ways of packed weights to engines, each between processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from threading import Event, Thread
from typing import Any

import pytest
import torch
from buckets import CPU
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from plimsoll.config.rollout import DecidedRoute
from plimsoll.errors import WeightSyncError
from plimsoll.sync.buckets import (
    WeightBucket,
    WeightLanding,
    rebuild_bucket,
    ship_bucket,
    split_bytes,
    sum_pieces,
)
from plimsoll.sync.channel import (
    CardOutlet,
    Channel,
    GroupOutlet,
    HostOutlet,
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


def receive(open_end: Callable[[], Inlet], rounds: int, connection: Any) -> None:
    """An engine's process: says what it read of each bucket."""
    inlet = open_end()
    for _ in range(rounds):
        bucket = rebuild_bucket(inlet.next())
        data = inlet.open(bucket.handle, bucket.bytes)
        pieces = {n: t.tolist() for n, t in split_bytes(bucket.tensors, data).items()}
        connection.send((pieces, sum_pieces(bucket.tensors, data)))
        inlet.release()
    connection.recv()
    inlet.close()
    connection.send("closed")


@contextmanager
def engines(*ends: Callable[[], Inlet], rounds: int = ROUNDS) -> Iterator[list[Any]]:
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in ends]
    processes = [
        context.Process(target=receive, args=(end, rounds, far))
        for end, (_, far) in zip(ends, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    yield [near for near, _ in pipes]
    for near, _ in pipes:
        near.send(None)
        assert answer(near) == "closed"
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

    def __init__(self, channel: Channel, number: int = 1, device: torch.device = CPU) -> None:
        self.channel, self.number, self.device = channel, number, device

    def __call__(self) -> Inlet:
        return open_inlet(self.channel, self.number, self.device)


def send_all(outlet: Outlet, connections: list[Any], first: int = 0) -> None:
    """All buckets are packed and posted before anybody asks what engines read of them."""
    numbers = range(first, first + ROUNDS)
    buckets = [ship_bucket(tensors_of(number), outlet) for number in numbers]
    for number, bucket in zip(numbers, buckets, strict=True):
        for connection in connections:
            check(bucket, answer(connection), number)


@pytest.mark.parametrize("near", [True, False])
def test_engines_read_host_memory_or_broadcasts(near: bool) -> None:
    outlet = open_outlet(Channel("host", LARGEST, readers=2, near=near), CPU)
    channel = outlet.channel
    with engines(End(channel, 1), End(channel, 2), rounds=2 * ROUNDS) as connections:
        send_all(outlet, connections)
        outlet.close()
        send_all(outlet, connections, ROUNDS)


def test_a_group_of_a_rank_and_two_engines_broadcasts() -> None:
    outlet = open_outlet(Channel("nccl", LARGEST, readers=2), CPU)
    channel = outlet.channel
    assert channel.port > 0
    with engines(End(channel, 1), End(channel, 2), rounds=2 * ROUNDS) as connections:
        send_all(outlet, connections)
        outlet.close()
        send_all(outlet, connections, ROUNDS)  # the next sync, in the same group
        outlet.close()


def test_each_engine_opens_the_memory_of_the_rank_on_its_card() -> None:
    """Shared tensors of torch.multiprocessing stand for two cards."""
    outlet = open_outlet(Channel("ipc", LARGEST, readers=1), CPU)
    channel = outlet.channel
    other = open_outlet(Channel("ipc", LARGEST, readers=1), CPU)
    beside = other.channel
    with engines(End(channel), End(beside)) as [first, second]:
        send_all(outlet, [first])
        send_all(other, [second])


def test_a_process_takes_the_channel_of_its_card() -> None:
    landing = WeightLanding(1, CPU)
    with pytest.raises(WeightSyncError, match="from this process's card"):
        landing.begin((), [Channel("ipc", LARGEST, card="another")])
    outlet = open_outlet(Channel("ipc", LARGEST, readers=1), CPU)
    channel = outlet.channel
    landing.begin((), [Channel("ipc", LARGEST, card="another"), channel])


@pytest.mark.parametrize("route", ["host", "ipc"])
def test_a_buffer_is_filled_anew_only_when_all_have_read_it(route: DecidedRoute) -> None:
    outlet = open_outlet(Channel(route, LARGEST, readers=2), CPU)
    channel = outlet.channel
    inlets = [open_inlet(channel, number, CPU) for number in (1, 2)]
    for number in range(2):
        ship_bucket(tensors_of(number), outlet)
    waiting = run_in_thread(lambda: ship_bucket(tensors_of(2), outlet))
    inlets[0].next()
    inlets[0].release()
    with pytest.raises(TimeoutError):
        waiting.result(1)
    inlets[1].next()
    inlets[1].release()
    waiting.result(60)


def test_card_memory_is_made_anew_after_a_sync() -> None:
    outlet = CardOutlet(CPU, Channel("ipc", LARGEST))
    first, second, third = (ship_bucket(tensors_of(i), outlet).handle for i in range(3))
    assert first != second and third == first  # two buffers, in turn
    outlet.close()
    assert ship_bucket(tensors_of(0), outlet).handle not in (first, second)


def test_host_memory_stays_for_the_next_sync() -> None:
    outlet = HostOutlet(CPU, Channel("host", LARGEST))
    paths = [ship_bucket(tensors_of(i), outlet).handle for i in range(4)]
    outlet.close()
    assert [ship_bucket(tensors_of(i), outlet).handle for i in range(2)] == paths[:2] == paths[2:]
    assert paths[0] != paths[1]


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


@pytest.mark.parametrize("route", ["host", "ipc"])
def test_who_waits_for_an_engine_that_died_is_freed(route: DecidedRoute) -> None:
    outlet = open_outlet(Channel(route, LARGEST, readers=2), CPU)
    channel = outlet.channel
    for number in range(2):
        ship_bucket(tensors_of(number), outlet)
    reader = open_inlet(channel, 1, CPU)
    for _ in range(2):
        reader.next()
        reader.release()
    sending = run_in_thread(lambda: ship_bucket(tensors_of(2), outlet))  # the second reader is dead
    reading = run_in_thread(reader.next)
    with pytest.raises(TimeoutError):
        reading.result(1)
    outlet.break_off()  # as from the thread that answers beside the one that sends
    for waiting in (sending, reading):
        with pytest.raises(WeightSyncError, match="an engine has died"):
            waiting.result(60)
    outlet.drop()


def test_a_rank_and_an_engine_are_freed_from_waiting_for_one_that_died() -> None:
    """It died before it joined: the third of three."""
    outlet = open_outlet(Channel("nccl", LARGEST, readers=2), CPU)
    channel = outlet.channel
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
    outlet = GroupOutlet(CPU, CPU, Channel("nccl", LARGEST, readers=1))
    context = get_context("spawn")
    near, far = context.Pipe()
    sender = context.Process(target=hold_store, args=(far,))
    sender.start()
    broken_off, died = Group(), Group()
    for group, port in ((broken_off, outlet.channel.port), (died, answer(near))):
        bell = TCPStore("127.0.0.1", port, is_master=False)
        Thread(target=_abort_when_over, args=(bell, group), daemon=True).start()
    assert not broken_off.abort_called.wait(1) and not died.abort_called.is_set()
    outlet.break_off()
    sender.kill()
    assert broken_off.abort_called.wait(60) and died.abort_called.wait(60)


def test_a_group_that_is_broken_off_while_nobody_waits_does_no_harm() -> None:
    outlet = open_outlet(Channel("nccl", LARGEST, readers=1), CPU)
    channel = outlet.channel
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
    outlet = open_outlet(Channel("nccl", LARGEST, readers=1), CPU)
    channel = outlet.channel
    sending = run_in_thread(lambda: ship_bucket(tensors_of(1), outlet))
    with pytest.raises(TimeoutError):
        sending.result(1)
    inlet = open_inlet(channel, 1, CPU)
    bucket = rebuild_bucket(inlet.next())
    pieces = split_bytes(bucket.tensors, inlet.open(bucket.handle, bucket.bytes))
    assert all(torch.equal(pieces[name], tensor) for name, tensor in tensors_of(1).items())
    assert sending.result(60) == bucket


def test_a_channel_that_is_opened_anew_is_another_one() -> None:
    """Its board may have the number of a file that the last one had."""
    first = open_outlet(Channel("ipc", LARGEST, readers=1), CPU).channel
    again = open_outlet(Channel("ipc", LARGEST, readers=1), CPU).channel
    assert replace(again, opened=first.opened) == replace(first, board=again.board)
    assert again != first


def test_engines_on_other_nodes_are_freed_from_waiting_for_one_that_died() -> None:
    """The sender's own broadcast fails, as gloo sees the death; the other engine waits."""
    outlet = open_outlet(Channel("host", LARGEST, readers=2, near=False), CPU)
    dying = get_context("spawn").Process(target=read_one, args=(outlet.channel,))
    dying.start()
    reading = run_in_thread(partial(read_all, outlet.channel))
    with pytest.raises((WeightSyncError, RuntimeError)):
        for number in range(10_000):
            ship_bucket(tensors_of(number), outlet)
    outlet.break_off()
    with pytest.raises(WeightSyncError, match="an engine has died"):
        reading.result(60)
    with pytest.raises(WeightSyncError):
        ship_bucket(tensors_of(0), outlet)
    dying.join(60)


def read_one(channel: Channel) -> None:
    inlet = open_inlet(channel, 1, CPU)
    inlet.open(rebuild_bucket(inlet.next()).handle, 64)
    os._exit(1)


def read_all(channel: Channel) -> None:
    inlet = open_inlet(channel, 2, CPU)
    while True:
        bucket = rebuild_bucket(inlet.next())
        inlet.open(bucket.handle, bucket.bytes)
