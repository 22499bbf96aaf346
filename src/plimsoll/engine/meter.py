"""Readings of this process's memory and of its card's, to be compared with the plan."""

from __future__ import annotations

import torch

from plimsoll.machine.meter import read_host
from plimsoll.machine.nvidia import busy_meter
from plimsoll.run.readings import CardReading, Reading


def read_memory(device: torch.device) -> Reading:
    """Read this process, and restart the peaks of its card."""
    return Reading(read_host(), read_card(device) if device.type == "cuda" else None)


def read_card(device: torch.device) -> CardReading:
    """Read the card, and restart torch's peaks."""
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
