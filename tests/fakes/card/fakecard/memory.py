"""`torch.cuda`'s memory: its statistics, pinned memory, storages, and CUDA IPC."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from fakecard.control import stat
from fakecard.library import library
from fakecard.streams import Device

CONTEXT = 500 << 20
"""Bytes of a card that a process takes beside its tensors."""


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return `torch.cuda.memory_stats` as far as anything here asks for it."""
    return {
        "allocated_bytes.all.current": stat("allocated"),
        "allocated_bytes.all.peak": stat("peak_allocated"),
        "reserved_bytes.all.current": stat("reserved"),
        "reserved_bytes.all.peak": stat("peak_reserved"),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def host_memory_stats() -> dict[str, int]:
    """Return `torch.cuda.host_memory_stats` as far as anything here asks for it."""
    made = stat("pinned_allocations")
    return {"num_host_alloc": made, "allocated_bytes.current": stat("pinned")}


def memory_snapshot() -> list[dict[str, Any]]:
    """Return a segment for each allocation: its address, its size, and whether it can grow."""
    lines = library().fc_segments().decode().splitlines()
    rows = ([int(word) for word in line.split()] for line in lines)
    return [{"address": row[0], "total_size": row[1], "is_expandable": row[2] == 1} for row in rows]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free bytes of the card and all of them."""
    return stat("capacity") - stat("reserved") - CONTEXT, stat("capacity")


def limit_memory(share: float, device: Any = None) -> None:
    """Let allocations above a share of the card fail (`set_per_process_memory_fraction`)."""
    library().fc_limit(int(share * stat("capacity")))


def set_allocator(settings: str) -> None:
    """Let new segments grow, or not, as `_accelerator_setAllocatorSettings` is told."""
    library().fc_expandable(int("expandable_segments:true" in settings.lower()))


class Runtime:
    """`torch.cuda.cudart()`: CUDA's functions that have no other name in torch."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin memory that is there already."""
        library().fc_pin(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Undo `cudaHostRegister`."""
        library().fc_unpin(address)
        return 0


def whole(storage: UntypedStorage) -> Tensor:
    """Return a storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_resize_on_host: Any = UntypedStorage.resize_
_clone_on_host: Callable[[UntypedStorage], UntypedStorage] = UntypedStorage.clone


def resize_storage(storage: UntypedStorage, size: int) -> UntypedStorage:
    """Give a storage another size (`UntypedStorage.resize_`)."""
    if storage.device.type != "cuda":
        _resize_on_host(storage, size)
        return storage
    torch.ops.fakecard.resize_storage(whole(storage), size)
    return storage


def clone_storage(storage: UntypedStorage) -> UntypedStorage:
    """Return a copy of a storage (`UntypedStorage.clone`)."""
    if storage.device.type != "cuda":
        return _clone_on_host(storage)
    return whole(storage).clone().untyped_storage()


_sent: dict[str, Tensor] = {}
"""Memory that other processes may open, by the file that counts its readers."""


def share_storage(storage: UntypedStorage) -> tuple[Any, ...]:
    """Return the names by which another process opens a storage (`_share_cuda_`).

    As in torch's CudaIPCTypes.cpp, the memory stays until a reader has opened it and let go of it.
    """
    data = whole(storage)
    descriptor, room, size = torch.ops.fakecard.share(data)
    path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    file, counter = tempfile.mkstemp(prefix="fakecard-readers-")
    os.write(file, b"1")
    os.close(file)
    _sent[counter] = data
    return storage.device.index, path, room, size, counter.encode(), 0, b"", True


def open_storage(device: int, path: bytes, room: int, size: int, counter: bytes, *_: Any) -> Any:
    """Return the storage of another process (`_new_shared_cuda`)."""
    with Device(device):
        opened = torch.ops.fakecard.open_shared(path.decode(), room, size, counter.decode())
    return opened.untyped_storage()


def release_reader(counter: bytes, place: int) -> None:
    """Count a reader of shared memory as gone (`_release_ipc_counter_cuda`)."""
    readers = Path(counter.decode())
    readers.write_text(str(int(readers.read_text()) - 1))


def collect_shared() -> None:
    """Drop memory that no other process reads any more (`torch.cuda.ipc_collect`)."""
    for counter in [*_sent]:
        if int(Path(counter).read_text()) <= 0:
            del _sent[counter]
            Path(counter).unlink()


_generators: list[torch.Generator] = []


def generator() -> torch.Generator:
    """Return the card's default generator, made at its first use."""
    if not _generators:
        _generators.append(torch.Generator("cuda"))
        torch.ops.fakecard.set_generator(_generators[0])
    return _generators[0]
