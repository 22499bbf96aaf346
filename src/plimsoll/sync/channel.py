"""The way of packed weights from the training ranks to the processes of engines.

A rank packs each bucket into the room of its `Outlet`, ships it, and posts what an engine must
know: its tensors, their checksums, and a handle. There each process takes what was posted from its
`Inlet`, opens the handle, and has the bytes. An outlet has two buffers in turn: while engines read
one, the rank fills the other. Ranks and engines go through all buckets of a sync by themselves;
nothing passes through the controller.

- host: rank 0 packs into memory that other processes of its node map. If engines are on other
  nodes, the bytes are broadcast by gloo instead.
- ipc: each rank on whose card an engine has a process packs there; that process maps the memory.
- nccl: rank 0 packs on its card, and broadcasts to all processes of the engines.

Where memory is shared, a rank posts on a `Board`, in memory that is shared, too, and on which
readers note what they have read. Else what is posted is broadcast before the bytes, and nobody need
be counted.

An engine that dies in the middle leaves its card's memory open, and the others waiting for a bucket
or in a broadcast that does not end: `break_off` frees them, `drop` the memory.

What is posted is plain values, so that nothing need be unpickled.

The members of a group meet in a store (`serve_store`, `find_store`), as the training ranks do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from plimsoll.config.rollout import DecidedRoute
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import own_address
from plimsoll.machine.local_host import expands, user_settings, with_segments
from plimsoll.process.threads import call_in_background

Handle = tuple[Any, ...]
"""What an outlet ships: the plain values by which an inlet finds a bucket's bytes."""

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, in a store or a collective. NCCL's own 10 minutes are too
short if a rank reads a large model from a slow disk, and engines may wake from sleep first."""
_LISTENING = timedelta(seconds=1)
"""How often a member that waits asks whether the transfer was broken off."""

_ARRIVED, _COMPLETE, _OVER = "plimsoll/arrived", "plimsoll/complete", "plimsoll/over"
"""Keys of a channel's store: how many members have come; that nobody need wait for more of them;
that the sender has broken off."""
_WORD = 8
_POSTED, _BROKEN_OFF, _NOTES = 0, _WORD, 2 * _WORD
"""Where a board has its words: how many buckets were posted; 1 once it is broken off; how many each
reader has read. The texts of two buckets follow."""
_MOST_READERS = 4096
_TEXT_ROOM = 2**26
"""Bytes for what is posted of a bucket; no more are used than are written."""
_LEAST_PAUSE, _MOST_PAUSE = 1e-4, 5e-3
"""How long whoever waits at a board sleeps before it looks again, seconds."""
_GIVEN_UP = "the channel was given up, because an engine has died"

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""The variable by which PyTorch chooses what an error of NCCL ends, when it makes a group."""


@dataclass(frozen=True)
class Channel:
    """The way that weights go, as a rank opened it.

    Attributes:
        route: the kind of way.
        largest: bytes of the largest bucket.
        readers: the processes of engines that read from the rank.
        card: the rank's card, whose processes read from it; only of `ipc`.
        near: whether all readers are on the rank's node.
        opened: a name that no other opening of a channel has.
        board: the path of the rank's board; "" for a group.
        address: the address of the group's store.
        port: the port of the group's store.
    """

    route: DecidedRoute
    largest: int
    readers: int = 0
    card: str = ""
    near: bool = True
    opened: str = ""
    board: str = ""
    address: str = "127.0.0.1"
    port: int = 0


class Outlet(Protocol):
    """The sending end of a channel, which `channel` describes to the readers."""

    channel: Channel

    def room(self, size: int) -> Tensor:
        """Return a buffer of so many bytes (uint8), at most `largest`, for the next bucket.

        Wait until engines have read the last bucket but one, however long that takes.

        Raises:
            WeightSyncError: the transfer was broken off meanwhile.
        """

    def ship(self) -> Handle:
        """Send the bucket that was packed into the last `room`; return its handle."""

    def post(self, values: Handle) -> None:
        """Tell the readers of the shipped bucket, by plain values.

        Raises:
            WeightSyncError: as `room`; or there are too many values.
        """

    def close(self) -> None:
        """Give card memory back. Engines must have closed their inlets; `room` opens it again."""

    def break_off(self) -> None:
        """Free all members from a transfer that will not end; another thread may be in it."""

    def drop(self) -> None:
        """Give back all memory, also what a dead engine had open; the outlet is used no more."""


class Inlet(Protocol):
    """The receiving end of a channel, in one process of an engine.

    Attributes:
        one_copy: whether all processes of an engine read the same memory, so that one of them need
            check it.
    """

    one_copy: bool

    def next(self) -> Handle:
        """Wait for the next bucket, and return the values that were posted.

        Raises:
            WeightSyncError: the transfer was broken off meanwhile.
        """

    def open(self, handle: Handle, size: int) -> Tensor:
        """Return a bucket's bytes (uint8) on the engine's device, valid until `release`."""

    def release(self) -> None:
        """Let the sender use the bucket's memory again."""

    def close(self) -> None:
        """Let go of all memory of the sender."""


class Board:
    """Where a rank posts buckets, and readers note which they have read: memory that they share.

    It has two places for what is posted, in turn, as there are two buffers.

    Args:
        readers: how many processes read each bucket.
    """

    def __init__(self, readers: int) -> None:
        self._file = os.memfd_create("board")
        weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, _texts_at(2))
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._readers = readers
        self._posted = 0

    def post(self, values: Handle) -> None:
        """Post the values of the next bucket."""
        text = json.dumps(values).encode()
        if len(text) > _TEXT_ROOM - _WORD:
            raise WeightSyncError(f"a bucket has too many tensors to be announced: {len(text)} B")
        os.pwrite(self._file, text, _texts_at(self._posted % 2) + _WORD)
        _set_word(self._file, _texts_at(self._posted % 2), len(text))
        self._posted += 1
        _set_word(self._file, _POSTED, self._posted)

    def wait_for_readers(self) -> None:
        """Wait until all have read the last bucket but one that was posted."""

        def have_read() -> bool:
            notes = np.frombuffer(os.pread(self._file, _MOST_READERS * _WORD, _NOTES), np.int64)
            return int((notes >= self._posted - 1).sum()) >= self._readers

        if self._posted > 1:
            _await(self._file, have_read)

    def break_off(self) -> None:
        """Free the readers, and whoever waits for them."""
        _set_word(self._file, _BROKEN_OFF, 1)


class BoardReader:
    """A reader's view of a rank's `Board`; `number` counts the engines' processes from 1."""

    def __init__(self, board: str, number: int) -> None:
        assert number < _MOST_READERS
        self._file = os.open(board, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._note = _NOTES + number * _WORD
        self._read = 0

    def next(self) -> Handle:
        """Wait for the next bucket, and return what was posted of it."""
        _await(self._file, lambda: _word(self._file, _POSTED) > self._read)
        place = _texts_at(self._read % 2)
        return tuple(json.loads(os.pread(self._file, _word(self._file, place), place + _WORD)))

    def release(self) -> None:
        """Note the bucket as read."""
        self._read += 1
        _set_word(self._file, self._note, self._read)


def _texts_at(number: int) -> int:
    return _NOTES + _MOST_READERS * _WORD + number * _TEXT_ROOM


def _word(file: int, place: int) -> int:
    return int.from_bytes(os.pread(file, _WORD, place), sys.byteorder)


def _set_word(file: int, place: int, value: int) -> None:
    os.pwrite(file, value.to_bytes(_WORD, sys.byteorder), place)


def _await(board: int, is_so: Callable[[], bool]) -> None:
    """Wait until it is so. Raises WeightSyncError if the transfer is broken off meanwhile."""
    pause = _LEAST_PAUSE
    while not is_so():
        if _word(board, _BROKEN_OFF):
            raise WeightSyncError(_GIVEN_UP)
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


class SharedFile:
    """Memory of this process that others of its node can map, until this object is gone."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("weights")
        weakref.finalize(self, os.close, descriptor)
        os.truncate(descriptor, size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.bytes = map_file(self.path, size)


def map_file(path: str, size: int) -> Tensor:
    """Return a file's bytes as a uint8 tensor that shares the file's memory."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class MappedFile:
    """A `SharedFile` of another process."""

    def __init__(self, path: str) -> None:
        self.bytes = map_file(path, os.stat(path).st_size)


class CardMemory:
    """Memory of a device that `CardInlet` can open in another process."""

    def __init__(self, size: int, device: torch.device) -> None:
        with fixed_segments(device):  # CUDA IPC has no names for growing ones
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        storage: Any = self.bytes.untyped_storage()
        share = storage._share_cuda_ if device.type == "cuda" else storage._share_filename_cpu_
        self.names: Handle = tuple(share())
        self.handle: Handle = tuple(x.hex() if isinstance(x, bytes) else x for x in self.names)

    def release(self) -> None:
        """Count the reader as gone, which has died before it let go of the memory.

        PyTorch counts a reader as soon as memory is shared, and keeps what has one for as long as
        this process lives (torch/csrc/CudaIPCTypes.cpp).
        """
        if self.bytes.is_cuda:
            *_, counter, place, _, _ = self.names
            storage: Any = torch.UntypedStorage
            storage._release_ipc_counter_cuda(counter, place)


def pin(file: SharedFile | MappedFile) -> None:
    """Pin a file's memory for as long as the file is held. Raises CudaError if CUDA cannot."""
    runtime: Any = torch.cuda.cudart()
    address = file.bytes.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, file.bytes.nbytes, 0))
    weakref.finalize(file, runtime.cudaHostUnregister, address).atexit = False


B = TypeVar("B", SharedFile, CardMemory)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _InTurn(Generic[B]):
    """Two buffers that are used in turn, each made when it is first needed."""

    def __init__(self, make: Callable[[], B]) -> None:
        self._make: Callable[[], B] = make
        self._buffers: list[B] = []

    def next(self) -> B:
        """Return the buffer whose turn it is."""
        self._buffers.append(self._make() if len(self._buffers) < 2 else self._buffers.pop(0))
        return self._buffers[-1]

    def take_all(self) -> list[B]:
        """Return the buffers that there are, and forget them."""
        buffers, self._buffers = self._buffers, []
        return buffers


class HostOutlet:
    """The sending end of `host` on one node: two buffers in shared memory, which stay.

    Args:
        device: the device on which weights are packed. A bucket on a card is copied whole.
        channel: the channel.
    """

    def __init__(self, device: torch.device, channel: Channel) -> None:
        self._device = device
        self._board = Board(channel.readers)
        self.channel = replace(channel, board=self._board.path)
        self.post, self.break_off = self._board.post, self._board.break_off
        self._files = _InTurn(partial(_host_file, channel.largest, device))
        self._packed = _NOTHING

    def room(self, size: int) -> Tensor:
        """Return the next buffer in shared memory, or one on the card."""
        assert size <= self.channel.largest
        self._board.wait_for_readers()
        self._file = self._files.next()
        if self._device.type == "cpu":
            self._packed = self._file.bytes[:size]
        else:
            self._packed = _NOTHING  # goes before the next is made
            self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._packed

    def ship(self) -> Handle:
        """Return the path of the bucket's file."""
        if self._device.type == "cuda":
            copy = self._file.bytes[: len(self._packed)]
            copy.copy_(self._packed, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        return (self._file.path,)

    def close(self) -> None:
        """Drop the copy on the card. The shared memory stays: new pages cost more than a copy."""
        self._packed = _NOTHING

    def drop(self) -> None:
        """Do nothing: the memory goes with this object."""


def _host_file(size: int, device: torch.device) -> SharedFile:
    """Return shared memory, pinned if weights are copied to it from a card."""
    file = SharedFile(size)
    if device.type == "cuda":
        pin(file)
    return file


class HostInlet:
    """The receiving end of `host`. For a card, the sender's files stay mapped, and are pinned."""

    def __init__(self, channel: Channel, number: int, device: torch.device) -> None:
        self._device = device
        self.one_copy = device.type == "cpu"
        reading = BoardReader(channel.board, number)
        self.next, self.release = reading.next, reading.release
        self._pinned: dict[str, MappedFile] = {}

    def open(self, handle: Handle, size: int) -> Tensor:
        """Map the sender's file; on a card, begin to copy it."""
        [path] = handle
        if self._device.type == "cpu":
            return map_file(path, size)
        if path not in self._pinned:
            self._pinned[path] = MappedFile(path)
            pin(self._pinned[path])
        return self._pinned[path].bytes[:size].to(self._device, non_blocking=True)

    def close(self) -> None:
        """Do nothing: the sender's files stay, too."""


class CardOutlet:
    """The sending end of `ipc`: two buffers on the card, which go back after each sync."""

    def __init__(self, device: torch.device, channel: Channel) -> None:
        self._device = device
        self._board = Board(channel.readers)
        self.channel = replace(channel, board=self._board.path)
        self.post, self.break_off = self._board.post, self._board.break_off
        self._buffers = _InTurn(lambda: CardMemory(channel.largest, device))
        self._handle: Handle = ()

    def room(self, size: int) -> Tensor:
        """Return the next buffer on the card."""
        assert size <= self.channel.largest
        self._board.wait_for_readers()
        buffer = self._buffers.next()
        self._handle = buffer.handle
        return buffer.bytes[:size]

    def ship(self) -> Handle:
        """Wait until the card has packed; return the memory's name."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._handle

    def close(self) -> None:
        """Give the card memory back, now that engines have let go of it."""
        self._buffers.take_all()
        _collect(self._device)

    def drop(self) -> None:
        """Give the card memory back, though a reader may have died with it."""
        for buffer in self._buffers.take_all():
            buffer.release()
        _collect(self._device)


class CardInlet:
    """The receiving end of `ipc`."""

    one_copy = False

    def __init__(self, channel: Channel, number: int, device: torch.device) -> None:
        self._device = device
        reading = BoardReader(channel.board, number)
        self.next, self.release = reading.next, reading.release
        self._open: dict[Handle, Tensor] = {}

    def open(self, handle: Handle, size: int) -> Tensor:
        """Return the sender's memory, which is opened once a sync."""
        if handle not in self._open:
            self._open[handle] = _open_memory(handle, self._device)
        return self._open[handle][:size]

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._open.clear()
        _collect(self._device)


def _open_memory(names: Handle, device: torch.device) -> Tensor:
    """Return memory that `CardMemory` of another process has shared, as a uint8 tensor.

    `names` is its `handle`, whose texts stand for bytes.
    """
    names = tuple(bytes.fromhex(x) if isinstance(x, str) else x for x in names)
    storage: Any = torch.UntypedStorage
    if device.type == "cuda":
        torch.cuda.init()
        _, *place = names  # the sender's number of the card; here it may have another
        shared = storage._new_shared_cuda(device.index or 0, *place)
    else:
        shared = storage._new_shared_filename_cpu(*names)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)


def _collect(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def card_name(device: torch.device) -> str:
    """Return a name of the device that all processes on it share; CPUs have none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class GroupOutlet:
    """The sending end of `nccl` (gloo on CPU): the first member of a process group.

    Consumes: buckets. Waits for: the engines' processes, in a thread that joins the group.
    Produces: broadcasts, which go on while the next bucket is packed. Shut down with its process.

    Args:
        device: the device on which weights are packed.
        over: the device of the group: the same, or the CPU.
        channel: the channel.
    """

    def __init__(self, device: torch.device, over: torch.device, channel: Channel) -> None:
        self._device, self._over = device, over
        self._store = serve_store(channel.address)  # for as long as this is there
        self.channel = replace(channel, port=self._store.port)
        self._bell = find_store(channel.address, self._store.port)
        # Engines hear of the group only when this returns.
        self._group = call_in_background(partial(_join, self.channel, 0, over, self._store))
        self._sent: list[tuple[Tensor, Any]] = []
        self._packed = _NOTHING

    def room(self, size: int) -> Tensor:
        """Return a new buffer, once the last broadcast but one has ended."""
        self._packed = _NOTHING  # goes before the next is made
        sent = self._sent
        if len(sent) == 2:
            with _given_up_by(self._bell):
                sent.pop(0)[1].wait()
        self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._packed

    def ship(self) -> Handle:
        """Return (): the bytes follow what is posted."""
        return ()

    def post(self, values: Handle) -> None:
        """Broadcast the values, and begin to broadcast the bytes."""
        group = self._group.result()
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        with _given_up_by(self._bell):
            for part in (torch.tensor([len(text)]), text):
                group.broadcast(part.to(self._over), 0).wait()
            packed = self._packed.to(self._over)
            self._sent.append((packed, group.broadcast(packed, 0)))

    def close(self) -> None:
        """Wait for all broadcasts, and drop their buffers."""
        with _given_up_by(self._bell):
            for _, work in self._sent:
                work.wait()
        self._sent.clear()
        self._packed = _NOTHING

    def break_off(self) -> None:
        """Free all members: those that wait for others to join, and those in a broadcast."""
        for key in (_OVER, _COMPLETE):
            self._bell.set(key, "")
        # Gloo frees the others only when the group is gone; whoever sends has it until it fails.
        group, self._group, self._sent = self._group, Future(), []
        self._group.set_exception(WeightSyncError(_GIVEN_UP))
        if group.done() and group.exception() is None:
            group.result().abort()

    def drop(self) -> None:
        """Free all members, and forget the buffers."""
        self.break_off()
        self._packed = _NOTHING


class GroupInlet:
    """The receiving end of `nccl`: member `number` of the sender's group, 1 or more.

    Consumes: broadcasts. Waits for: the sender. Unblocked by: the sender's broadcast, or by a
    thread of its own that waits until the sender breaks off or has died. Shut down by the sender,
    or with its process.
    """

    one_copy = False

    def __init__(
        self, channel: Channel, number: int, device: torch.device, over: torch.device
    ) -> None:
        self._device, self._over = device, over
        self._bell = find_store(channel.address, channel.port)
        self._group = _join(channel, number, over, find_store(channel.address, channel.port))

    def _take(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        data = torch.empty(size, dtype=dtype, device=self._over)
        with _given_up_by(self._bell):
            self._group.broadcast(data, 0).wait()
        return data

    def next(self) -> Handle:
        """Take the broadcast of what was posted."""
        size = int(self._take(1, torch.int64))
        return tuple(json.loads(self._take(size).cpu().numpy().tobytes()))

    def open(self, handle: Handle, size: int) -> Tensor:
        """Take the broadcast of the bytes."""
        return self._take(size).to(self._device)

    def release(self) -> None:
        """Do nothing: the sender's buffer is its own."""

    def close(self) -> None:
        """Do nothing: each buffer ends with its last tensor."""


def _abort_when_over(bell: Store, group: Any) -> None:
    """Wait until the sender breaks off, or its store is gone; then free this member.

    The thread asks again and again: a thread that waits inside PyTorch when Python ends would end
    the process with SIGABRT.
    """
    try:
        with suppress(dist.DistError):
            while not bell.check([_OVER]):
                time.sleep(_LISTENING.total_seconds())
    finally:
        group.abort()


@contextmanager
def _given_up_by(bell: Store) -> Iterator[None]:
    """Raise WeightSyncError for an error of a group in the block, if the sender has broken off."""
    try:
        yield
    except RuntimeError as error:  # as PyTorch raises what ends a collective
        try:
            is_over = bell.check([_OVER])
        except dist.DistError:  # the sender is gone
            is_over = True
        if is_over:
            raise WeightSyncError(_GIVEN_UP) from error
        raise


def _join(channel: Channel, number: int, device: torch.device, store: Store) -> Any:
    """Return the process group of a channel, once all members have joined.

    It is apart from the process's default group, which other processes form. NCCL cannot be stopped
    while it waits for a member, so members wait for one another in the store before.

    Raises:
        WeightSyncError: the sender has broken off meanwhile.
    """
    members = channel.readers + 1
    if store.add(_ARRIVED, 1) == members:
        store.set(_COMPLETE, "")
    store.wait([_COMPLETE])
    if store.check([_OVER]):
        raise WeightSyncError(_GIVEN_UP)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        with _errors_end_only_groups():
            group: Any = dist.ProcessGroupNCCL(store, number, members, options)
    else:
        group = dist.ProcessGroupGloo(store, number, members, PATIENCE)
    # Each thread that asks a store needs its own connection. Whoever breaks off from here on is
    # heard, also while members still wait for the first broadcast.
    bell = find_store(channel.address, channel.port)
    Thread(target=_abort_when_over, args=(bell, group), daemon=True).start()
    with _given_up_by(store):
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
    return group


@contextmanager
def _errors_end_only_groups() -> Iterator[None]:
    """Let groups of NCCL that are made in the block outlive the death of a member.

    By its default, PyTorch's watchdog ends the process when a communicator fails, as when a peer
    has died. `CleanUpOnly` ends the communicator alone (ProcessGroupNCCL.hpp, ErrorHandlingMode).
    """
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "2"
    try:
        yield
    finally:
        os.environ.pop(_HANDLING, None)
        os.environ |= {} if before is None else {_HANDLING: before}


def open_outlet(channel: Channel, device: torch.device) -> Outlet:
    """Return the sending end of a channel, with the board or the port that it opened."""
    channel = replace(channel, opened=uuid4().hex)
    if channel.route == "ipc":
        return CardOutlet(device, channel)
    if channel.route == "host" and channel.near:
        return HostOutlet(device, channel)
    return GroupOutlet(device, _group_device(channel, device), channel)


def open_inlet(channel: Channel, number: int, device: torch.device) -> Inlet:
    """Return the receiving end of a channel; `number` counts the engines' processes from 1."""
    if channel.route == "ipc":
        return CardInlet(channel, number, device)
    if channel.route == "host" and channel.near:
        return HostInlet(channel, number, device)
    return GroupInlet(channel, number, device, _group_device(channel, device))


def _group_device(channel: Channel, device: torch.device) -> torch.device:
    return torch.device("cpu") if channel.route == "host" else device


def serve_store(address: str, port: int = 0, ranks: int | None = None) -> TCPStore:
    """Return a store that this process serves at one address of the machine.

    TCPStore by itself listens at all addresses. A store asks nobody for a key: whoever reaches it
    can change what the ranks tell one another.

    Args:
        address: The address at which other ranks look for the store.
        port: Its port; 0 for a free one.
        ranks: How many ranks to wait for; None to wait for none.
    """
    own = own_address(address)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, port), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            own,
            port,
            ranks,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=ranks is not None,
            master_listen_fd=os.dup(listening.fileno()),  # the store closes it
        )


def find_store(address: str, port: int, ranks: int | None = None) -> TCPStore:
    """Return a connection to a store that another process, or this one, serves."""
    return TCPStore(address, port, ranks, is_master=False, timeout=PATIENCE)


def expand_segments(expandable: bool) -> None:
    """Let torch's CUDA allocator make expandable segments from now on, or fixed ones.

    Segments that the process already has stay as they are. Memory shared by CUDA IPC needs fixed
    segments. The user's other settings are set again: PyTorch drops every setting that a change
    leaves out.
    """
    bindings: Any = torch._C
    change = getattr(bindings, "_accelerator_setAllocatorSettings", None)
    change = change or torch.cuda.memory._set_allocator_settings  # of a torch without that name
    change(with_segments(user_settings(), expandable))


@contextmanager
def fixed_segments(device: torch.device) -> Iterator[None]:
    """During the block, let torch's CUDA allocator make fixed segments only, as CUDA IPC needs."""
    if device.type == "cpu":
        yield
        return
    expand_segments(False)
    try:
        yield
    finally:
        expand_segments(not user_settings() or expands(user_settings()))
