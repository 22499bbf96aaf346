"""The moments that AdamW keeps of each master: made, counted, and seen as flat rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def moment_rows(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """Both moments of every master, zeros where no gradient ever came; nothing before the first
    update, which makes them."""
    states = [optimizer.state.get(master, {}) for master in masters]
    if not any(MOMENTS[0] in state for state in states):
        return {}
    pairs = list(zip(states, masters, strict=True))
    return {name: [_row(state.get(name), master) for state, master in pairs] for name in MOMENTS}


def _row(moment: Tensor | None, master: Tensor) -> Tensor:
    return (torch.zeros_like(master.data) if moment is None else moment).view(-1)


def begin_moments(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], updates: int
) -> dict[str, list[Tensor]]:
    """Have moments to write into, as AdamW makes them, after so many updates; none after 0."""
    for master in masters:
        state = optimizer.state[master]
        if updates == 0:
            state.clear()
        elif not state:
            state |= {name: _zeros(optimizer, master) for name in MOMENTS}
        if state:
            state["step"] = _count(optimizer, master, updates)
    return moment_rows(optimizer, masters)


def _zeros(optimizer: torch.optim.Optimizer, master: Tensor) -> Tensor:
    wide = getattr(optimizer, "fp32_optimizer_states", False)  # of DeepSpeedCPUAdam
    return torch.zeros_like(master.data, dtype=torch.float32 if wide else master.dtype)


def _count(optimizer: torch.optim.Optimizer, master: Tensor, updates: int) -> Any:
    """The count of updates, which the bias correction needs, as the optimizer keeps it."""
    if isinstance(optimizer, torch.optim.AdamW):
        return torch.tensor(float(updates), device=master.device)
    return updates
