"""The way of packed weights from the training ranks to the processes of engines.

A rank packs each bucket into the room of its `Outlet` and ships it; what it gets is a handle, which
goes through the controller to the engines. There each process opens the handle with its `Inlet` and
has the bytes. An outlet has two buffers in turn: while engines read one, the rank fills the other.

- host: rank 0 packs into memory that other processes of its node map. Engines on other nodes get
  the bytes in the handle itself.
- ipc: each rank on whose card an engine has a process packs there; that process maps the memory.
- nccl: rank 0 packs on its card, and broadcasts to all processes of the engines.

An engine that dies in the middle leaves its card's memory open, and the others in a broadcast that
does not end: `break_off` frees them, `drop` the memory.

Handles hold plain values only, so that nothing need be unpickled from them.

Processes meet in stores (`serve_store`, `find_store`), those of the training ranks as well.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Thread
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from plimsoll.config.rollout import DecidedRoute
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import own_address
from plimsoll.machine.local_host import expands, user_settings, with_segments

Handle = tuple[Any, ...]
"""What an outlet ships: the plain values by which an inlet finds a bucket's bytes."""

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, in a store or a collective. NCCL's own 10 minutes are too
short if a rank reads a large model from a slow disk, and engines may wake from sleep first."""
_LISTEN_SECONDS = 1.0
"""How often an engine's process asks whether the sender has broken off."""

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""The variable by which PyTorch chooses what an error of NCCL ends, when it makes a group."""


@dataclass(frozen=True)
class Channel:
    """The way that weights go, as rank 0 opened it.

    Attributes:
        route: the kind of way.
        largest: bytes of the largest bucket.
        address: the address of the members' rendezvous; only of `nccl`.
        port: the port of the rendezvous.
        members: rank 0 and all processes of all engines.
    """

    route: DecidedRoute
    largest: int
    address: str = ""
    port: int = 0
    members: int = 0


class Outlet(Protocol):
    """The sending end of a channel."""

    def room(self, size: int) -> Tensor:
        """Return a buffer of so many bytes (uint8) for the next bucket.

        Engines must have read the last bucket but one.
        """

    def ship(self) -> Handle:
        """Send the bucket that was packed into the last `room`; return its handle."""

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

    def reaches(self, handle: Handle) -> bool:
        """Return whether the handle is for this process."""

    def open(self, handle: Handle, size: int) -> Tensor:
        """Return a bucket's bytes (uint8) on the engine's device, valid until the next bucket."""

    def close(self) -> None:
        """Let go of all memory of the sender."""


class SharedFile:
    """Memory of this process that others of its node can map; it ends with this process."""

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
    """The sending end of `host`: two buffers in shared memory, which stay for the next sync.

    Args:
        device: the device on which weights are packed. A bucket on a card is copied whole.
        largest: bytes of the largest bucket.
        near: whether every engine is on this node.
    """

    def __init__(self, device: torch.device, largest: int, near: bool) -> None:
        self._device, self._largest, self._near = device, largest, near
        self._files = _InTurn(self._make_file)
        self._packed = _NOTHING

    def _make_file(self) -> SharedFile:
        file = SharedFile(self._largest)
        if self._device.type == "cuda":
            pin(file)
        return file

    def room(self, size: int) -> Tensor:
        """Return the next buffer in shared memory, or one on the card."""
        self._file = self._files.next()
        if self._device.type == "cpu":
            self._packed = self._file.bytes[:size]
        else:
            self._packed = _NOTHING  # goes before the next is made
            self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._packed

    def ship(self) -> Handle:
        """Return the file's path if every engine is near, else the bytes."""
        copy = self._file.bytes[: len(self._packed)]
        if self._device.type == "cuda":
            copy.copy_(self._packed, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        return (self._file.path,) if self._near else (copy.numpy(),)

    def close(self) -> None:
        """Drop the copy on the card. The shared memory stays: new pages cost more than a copy."""
        self._packed = _NOTHING

    def break_off(self) -> None:
        """Do nothing: no engine holds this rank up."""

    def drop(self) -> None:
        """Do nothing: the memory goes with this object."""


class HostRelay:
    """Two buffers in which an engine keeps what came in handles for its own processes."""

    def __init__(self) -> None:
        self._largest = 0

    def fit(self, largest: int) -> None:
        """Make the buffers anew if they are too small for a channel's largest bucket, bytes."""
        if largest > self._largest:
            self._largest = largest
            self._files = _InTurn(lambda: SharedFile(largest))

    def forward(self, handle: Handle) -> Handle:
        """Return the handle, with bytes of its own replaced by a path of shared memory."""
        if len(handle) != 1 or isinstance(handle[0], str):
            return handle
        file, data = self._files.next(), torch.from_numpy(handle[0])
        file.bytes[: len(data)].copy_(data)
        return (file.path,)


class HostInlet:
    """The receiving end of `host`. For a card, the sender's files stay mapped, and are pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.one_copy = device.type == "cpu"
        self._pinned: dict[str, MappedFile] = {}

    def reaches(self, handle: Handle) -> bool:
        """Return True: rank 0 sends to everyone."""
        return True

    def open(self, handle: Handle, size: int) -> Tensor:
        """Map the sender's file, or take the bytes of the handle; on a card, begin to copy them."""
        [source] = handle
        if not isinstance(source, str):
            return torch.from_numpy(source).to(self._device)
        if self._device.type == "cpu":
            return map_file(source, size)
        if source not in self._pinned:
            self._pinned[source] = MappedFile(source)
            pin(self._pinned[source])
        return self._pinned[source].bytes[:size].to(self._device, non_blocking=True)

    def close(self) -> None:
        """Do nothing: the sender's files stay, too."""


class CardOutlet:
    """The sending end of `ipc`: two buffers on the card, which go back after each sync."""

    def __init__(self, device: torch.device, largest: int, card: str) -> None:
        self._device, self._card = device, card
        self._buffers = _InTurn(lambda: CardMemory(largest, device))
        self._names: Handle = ()

    def room(self, size: int) -> Tensor:
        """Return the next buffer on the card."""
        buffer = self._buffers.next()
        self._names = buffer.names
        return buffer.bytes[:size]

    def ship(self) -> Handle:
        """Wait until the card has packed; return the card's name and the memory's."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return (self._card, *self._names)

    def close(self) -> None:
        """Give the card memory back, now that engines have let go of it."""
        self._buffers.take_all()
        _collect(self._device)

    def break_off(self) -> None:
        """Do nothing: no engine holds this rank up."""

    def drop(self) -> None:
        """Give the card memory back, though a reader may have died with it."""
        for buffer in self._buffers.take_all():
            buffer.release()
        _collect(self._device)


class CardInlet:
    """The receiving end of `ipc`."""

    one_copy = False

    def __init__(self, device: torch.device, card: str) -> None:
        self._device, self._card = device, card
        self._open: dict[Handle, Tensor] = {}

    def reaches(self, handle: Handle) -> bool:
        """Return whether the memory is on this process's card."""
        return bool(handle[0] == self._card)

    def open(self, handle: Handle, size: int) -> Tensor:
        """Return the sender's memory, which is opened once a sync."""
        names = tuple(handle[1:])
        if names not in self._open:
            self._open[names] = _open_memory(names, self._device)
        return self._open[names][:size]

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._open.clear()
        _collect(self._device)


def _open_memory(names: Handle, device: torch.device) -> Tensor:
    """Return memory that `CardMemory` of another process has shared, as a uint8 tensor."""
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
    """

    def __init__(self, device: torch.device, address: str, members: int) -> None:
        self._device = device
        store = serve_store(address)
        self.port = store.port
        self._bell = find_store(address, store.port)
        # Engines hear of the group only when this returns.
        self._group = ThreadPoolExecutor(1).submit(_join, store, 0, members, device)
        self._sent: list[tuple[Tensor, Any]] = []
        self._packed = _NOTHING

    def room(self, size: int) -> Tensor:
        """Return a new buffer, once the last broadcast but one has ended."""
        if len(self._sent) == 2:
            self._sent.pop(0)[1].wait()
        self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._packed

    def ship(self) -> Handle:
        """Begin to broadcast; the handle holds nothing."""
        work = self._group.result().broadcast(self._packed, 0)
        self._sent.append((self._packed, work))
        return ()

    def close(self) -> None:
        """Wait for all broadcasts, and drop their buffers."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()
        self._packed = _NOTHING

    def break_off(self) -> None:
        """Free all members: those that wait for others to join, and those in a broadcast."""
        for key in (_OVER, _COMPLETE):
            self._bell.set(key, "")
        if self._group.done() and self._group.exception() is None:
            self._group.result().abort()

    def drop(self) -> None:
        """Free all members, and forget the buffers."""
        self.break_off()
        self._sent.clear()
        self._packed = _NOTHING


class GroupInlet:
    """The receiving end of `nccl`: member `number` of the sender's group, 1 or more.

    Consumes: broadcasts. Waits for: the sender. Unblocked by: the sender's broadcast, or by a
    thread of its own that waits until the sender breaks off or has died. Shut down by the sender,
    or with its process.
    """

    one_copy = False

    def __init__(self, channel: Channel, number: int, device: torch.device) -> None:
        self._device = device
        store = find_store(channel.address, channel.port)
        self._group = _join(store, number, channel.members, device)
        bell = find_store(channel.address, channel.port)  # each thread that waits needs its own
        Thread(target=_abort_when_over, args=(bell, self._group), daemon=True).start()

    def reaches(self, handle: Handle) -> bool:
        """Return True: rank 0 sends to everyone."""
        return True

    def open(self, handle: Handle, size: int) -> Tensor:
        """Take the next broadcast."""
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.broadcast(data, 0).wait()
        return data

    def close(self) -> None:
        """Do nothing: each buffer ends with its last tensor."""


_ARRIVED, _COMPLETE, _OVER = "plimsoll/arrived", "plimsoll/complete", "plimsoll/over"
"""Keys of a channel's store: how many members have come; that nobody need wait for more of them;
that the sender has broken off."""


def _abort_when_over(bell: Store, group: Any) -> None:
    """Wait until the sender breaks off, or its store is gone; then free this member.

    The thread asks again and again: a thread that waits inside PyTorch when Python ends would end
    the process with SIGABRT.
    """
    with suppress(dist.DistError):
        while not bell.check([_OVER]):
            time.sleep(_LISTEN_SECONDS)
    group.abort()


def _join(store: Store, number: int, members: int, device: torch.device) -> Any:
    """Return the process group of a channel, once all members have joined and heard the first.

    It is apart from the process's default group, which other processes form. NCCL cannot be stopped
    while it waits for a member, so members wait for one another in the store before.

    Raises:
        WeightSyncError: the sender has broken off meanwhile.
    """
    if store.add(_ARRIVED, 1) == members:
        store.set(_COMPLETE, "")
    store.wait([_COMPLETE])
    if store.check([_OVER]):
        raise WeightSyncError("the channel was given up, because an engine has died")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        with _errors_end_only_groups():
            group: Any = dist.ProcessGroupNCCL(store, number, members, options)
    else:
        group = dist.ProcessGroupGloo(store, number, members, PATIENCE)
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
        os.environ.pop(_HANDLING)
        os.environ |= {} if before is None else {_HANDLING: before}


def open_outlet(channel: Channel, device: torch.device, near: bool) -> tuple[Outlet, Channel]:
    """Return the sending end of a channel, and the channel with the port that this end opened."""
    match channel.route:
        case "ipc":
            return CardOutlet(device, channel.largest, card_name(device)), channel
        case "nccl":
            group = GroupOutlet(device, channel.address, channel.members)
            return group, replace(channel, port=group.port)
        case "host":
            return HostOutlet(device, channel.largest, near), channel


def open_inlet(channel: Channel, number: int, device: torch.device) -> Inlet:
    """Return the receiving end of a channel; `number` counts the engines' processes from 1."""
    match channel.route:
        case "ipc":
            return CardInlet(device, card_name(device))
        case "nccl":
            return GroupInlet(channel, number, device)
        case "host":
            return HostInlet(device)


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
