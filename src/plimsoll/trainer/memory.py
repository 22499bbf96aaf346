"""Memory of this process and its card: readings, and memory errors that name role and bytes.

Readings are compared with the plan. Memory errors of torch and of Python become OutOfMemory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from plimsoll.errors import FunctionFailed
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.machine.nvidia import busy_meter
from plimsoll.machine.processes import process_bytes, read_host
from plimsoll.run.readings import CardReading, DividedShare, Footprint, Reading


def read_memory(device: torch.device) -> Reading:
    """Return the memory of this process and of its card; restart the card's peaks."""
    return Reading(read_host(), read_card(device) if device.type == "cuda" else None)


def read_card(device: torch.device) -> CardReading:
    """Return the card's memory and how busy the card is; restart torch's peaks."""
    free, total = torch.cuda.mem_get_info(device)
    reading = CardReading(
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        used=total - free,
        capacity=total,
        busy=busy_meter(f"GPU-{torch.cuda.get_device_properties(device).uuid}").read(),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return reading


_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|could not create a primitive$"
)
"""Messages of torch's allocator, and of oneDNN without memory for a kernel's code. For an operation
that oneDNN cannot compute at all, its message says primitive *descriptor*."""
_CARD = re.compile(
    r"CUDA (?:error|failure \d+).*out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""Messages from outside of torch's allocator: of CUDA itself, NCCL, cuBLAS."""
_ASKED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def explain_shortage(
    device: torch.device,
    role: Callable[[], str | None],
    shares: Callable[[], tuple[DividedShare, ...]] = tuple,
) -> Iterator[None]:
    """Turn an allocation that fails inside the block into OutOfMemory.

    torch.OutOfMemoryError is a RuntimeError; on CPU torch raises a plain RuntimeError. A user's
    loss function that runs out of memory (FunctionFailed) counts, too.

    Args:
        device: The device that the process computes on.
        role: Returns the role at work; called only after a failure.
        shares: Returns what the rank holds of divided roles; called only after a failure.
    """
    try:
        yield
    except (RuntimeError, MemoryError, FunctionFailed) as error:
        first = error.__cause__ if isinstance(error, FunctionFailed) else error
        if not isinstance(first, RuntimeError | MemoryError) or not is_shortage(first):
            raise
        text = f"{type(first).__name__}: {first}".splitlines()[0]
        match = _ASKED.search(text)
        on_card = device.type == "cuda" and _is_of_card(first)
        incident = Incident(
            where="device" if on_card else "host",
            why=text,
            role=role(),
            asked=None if match is None else int(float(match[1]) * _UNITS[match[2]]),
            held=footprint(device),
            shares=shares(),
        )
        raise OutOfMemory(text, incident) from error


def is_shortage(error: RuntimeError | MemoryError) -> bool:
    """Return whether the error says that memory, of a card or of the host, could not be had."""
    is_known_type = isinstance(error, MemoryError) or _is_of_card(error)
    return is_known_type or _CPU.search(str(error)) is not None


def _is_of_card(error: RuntimeError | MemoryError) -> bool:
    """Return whether an error says that the card's memory is full, not the host's."""
    return isinstance(error, torch.OutOfMemoryError) or _CARD.search(str(error)) is not None


def footprint(device: torch.device) -> Footprint | None:
    """Return the host and card memory held now; None for a card if CUDA is not initialised.

    The front process of an engine with its own processes never initialises CUDA: a context, made
    only to read the card, would take more memory of a full card.
    """
    if device.type != "cuda":
        return Footprint(process_bytes())
    if not torch.cuda.is_initialized():
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    return Footprint(
        process_bytes(), allocated, torch.cuda.memory_reserved(device), capacity - free
    )
