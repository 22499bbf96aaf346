"""What this process holds, on its card too, and how much of each divided role, to be held against
P / N."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.protocol import Engine
from plimsoll.engine.zero.engine import ZeroEngine
from plimsoll.machine.meter import read_host
from plimsoll.machine.nvidia import busy_meter
from plimsoll.run.readings import CardReading, Reading, Share

_NAMES = {2: "bf16", 4: "fp32"}
"""Of masters, as the plan has them; by bytes."""


def read_memory(device: torch.device) -> Reading:
    """Read this process, and let its peaks start again."""
    return Reading(read_host(), read_card(device) if device.type == "cuda" else None)


def read_card(device: torch.device) -> CardReading:
    """Read the card, and let torch's peaks start again."""
    free, whole = torch.cuda.mem_get_info(device)
    reading = CardReading(
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        used=whole - free,
        capacity=whole,
        busy=busy_meter(f"GPU-{torch.cuda.get_device_properties(device).uuid}").read(),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return reading


def share_of(name: str, role: TrainedRole | FrozenRole, engine: Engine, ranks: int) -> Share | None:
    """Of the weights at stage 3, of the masters at stages 1 and 2; None where nothing is
    divided. The tensors that ZeRO keeps whole, being small, count as their shares."""
    stage = role.stage if isinstance(role, FrozenRole) else role.zero.stage
    if stage == 0 or ranks == 1:
        return None
    if stage == 3:
        parameters: list[Any] = list(engine.module.parameters())
        whole = sum(p.ds_numel * p.element_size() for p in parameters)
        held = sum(p.ds_tensor.numel() * p.element_size() for p in parameters)
        return Share(name, "weights", whole, ranks, held)
    assert isinstance(engine, ZeroEngine)
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    masters = engine.masters()
    each, held = masters[0].element_size(), sum(master.nbytes for master in masters)
    return Share(name, f"{_NAMES[each]} masters", each * trained, ranks, held)
