"""The groups of parameters that AdamW treats alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import nn

from plimsoll.config.engine import OptimizerConfig

_MOST_IN_8_BITS = 2**30
"""The most elements of a group of parameters: a rank's share of it has under 2^31. DeepSpeed lays
the share out as one row, and bitsandbytes 0.50 counts a row on CUDA in 32 bits (backends/cuda/
ops.py, `c_int32(g.numel())`): it would update a part of a longer row, or nothing."""


def parameter_groups(module: nn.Module, settings: OptimizerConfig) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices decay, vectors (norms, biases) never do.

    Embeddings (and a head tied to one) decay if the settings say so. A group that would be too long
    for 8 bits is split.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    undecayed = set() if settings.decay_embeddings else set(map(id, tables))
    decaying = [p for p in trained if p.ndim >= 2 and id(p) not in undecayed]
    never_decaying = [p for p in trained if p.ndim < 2 or id(p) in undecayed]
    most = _MOST_IN_8_BITS if settings.kind == "adamw_8bit" else inf
    return [
        {"params": part, "weight_decay": decay}
        for parameters, decay in ((decaying, settings.weight_decay), (never_decaying, 0.0))
        for part in _parts(parameters, most)
    ]


def _parts(parameters: Sequence[nn.Parameter], most: float) -> list[list[nn.Parameter]]:
    """Split parameters into parts of at most so many elements; a larger parameter is alone."""
    parts: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        if parameter.numel() > room or not parts:
            parts.append([])
            room = most
        parts[-1].append(parameter)
        room -= parameter.numel()
    return parts
