"""A rank's masters (the tensors that its optimizer updates) and their moving average.

DeepSpeed 0.19.8 flattens, joins and divides weights in another way at every stage. Here all stages
are described alike, so that checkpoints and moving averages do not depend on the stage.

The exponential moving average is on the masters' device and divided as they are. See Polyak and
Juditsky 1992, as used for networks in Tarvainen and Valpola 2017
(https://arxiv.org/abs/1703.01780).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.trainer.checkpoint import Stretch

_PIECE = 2**24
"""Elements that are copied at once, so that no second copy of a master is made."""


class Average:
    """The moving average of a rank's masters.

    Attributes:
        rows: The average of each master (fp32, flat).
    """

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self._decay = decay
        self.rows = [master.clone() for master in masters]

    def add(self, masters: Sequence[Tensor], updates: int) -> None:
        """Update the average with the masters; `updates`: updates so far, 1 after the first.

        The decay rises to its value by (1 + n) / (10 + n), so that the first weights are soon
        forgotten.
        """
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for row, master in self._pieces(masters):
            row.lerp_(master, 1 - decay)

    def swap(self, masters: Sequence[Tensor]) -> None:
        """Exchange masters and average."""
        for row, master in self._pieces(masters):
            averaged = row.clone()
            row.copy_(master)
            master.copy_(averaged)

    def _pieces(self, masters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for row, master in zip(self.rows, masters, strict=True):
            yield from zip(row.split(_PIECE), master.split(_PIECE), strict=True)


@dataclass(frozen=True)
class Masters:
    """A rank's share of the trained weights.

    Attributes:
        tensors: The tensors that its optimizer updates; they may end in padding.
        parts: The stretches of weights in these tensors.
        optimizer: AdamW itself.
        spread: Writes the masters' values into the model's weights; all ranks must call it.
    """

    tensors: Sequence[Tensor]
    parts: Sequence[Stretch]
    optimizer: torch.optim.Optimizer
    spread: Callable[[], None]

    def flat(self) -> list[Tensor]:
        """Return flat views of the tensors."""
        return [tensor.data.view(-1) for tensor in self.tensors]


def find_masters(module: nn.Module, optimizer: Any, stage: int, rank: int) -> Masters:
    """Return this rank's masters, given the optimizer that DeepSpeed made around AdamW."""
    names = {id(p): name for name, p in module.named_parameters()}
    if stage == 0:
        return _stage_0(names, optimizer)
    return _stage_3(names, optimizer, rank) if stage == 3 else _stage_1_and_2(names, optimizer)


def _stage_0(names: dict[int, str], optimizer: Any) -> Masters:
    """Return the masters at stage 0, all on every rank: in fp32 the weights, in bf16 fp32 copies.

    The copies are made in runtime/fp16/unfused_optimizer.py.
    """
    if not hasattr(optimizer, "fp32_groups"):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        return Masters(weights, _whole_stretches(names, weights), optimizer, lambda: None)
    weights = [p for group in optimizer.fp16_groups for p in group]
    copies = [p for group in optimizer.fp32_groups for p in group]

    def spread() -> None:
        for weight, copy in zip(weights, copies, strict=True):
            weight.data.copy_(copy.data)

    return Masters(copies, _whole_stretches(names, weights), optimizer.optimizer, spread)


def _whole_stretches(names: dict[int, str], weights: Sequence[Tensor]) -> list[Stretch]:
    return [Stretch(names[id(w)], 0, i, 0, w.numel()) for i, w in enumerate(weights)]


def _stage_1_and_2(names: dict[int, str], optimizer: Any) -> Masters:
    """Return the masters at stages 1 and 2: one flat tensor per parameter group.

    DeepSpeed notes at each weight which part of it the tensor holds (utils/tensor_fragment.py).
    """
    base = optimizer.optimizer
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    tensors = [group["params"][0] for group in base.param_groups]
    parts = [
        Stretch(names[id(weight)], held.lp_fragment_address.start, i, at.start, at.numel)
        for i, group in enumerate(groups)
        for weight in group
        if (held := weight._hp_mapping) is not None
        for at in [held.hp_fragment_address]
    ]
    return Masters(tensors, parts, base, optimizer.update_lp_params)


def _stage_3(names: dict[int, str], optimizer: Any, rank: int) -> Masters:
    """Return the masters at stage 3: one flat tensor per sub-group.

    It holds this rank's shares of the sub-group's weights, one after another; see
    runtime/zero/stage3.py.
    """
    tensors = optimizer.fp32_partitioned_groups_flat

    def spread() -> None:
        optimizer.checkpoint_event_prologue()  # no weight may be gathered meanwhile
        for i in range(len(tensors)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        optimizer.checkpoint_event_epilogue()  # gathers small weights, which stay gathered

    groups = enumerate(optimizer.fp16_groups)
    parts = [part for i, group in groups for part in _shares(names, group, i, rank)]
    return Masters(tensors, parts, optimizer.optimizer, spread)


def _shares(
    names: dict[int, str], group: Sequence[Any], master: int, rank: int
) -> Iterator[Stretch]:
    """Yield this rank's share of every weight of a sub-group.

    Every weight is cut into equal shares, the last of which end in padding.
    """
    offset = 0
    for weight in group:
        share = weight.partition_numel()
        start = rank * share
        size = min(share, weight.ds_numel - start)
        if size > 0:
            yield Stretch(names[id(weight)], start, master, offset, size)
        offset += share
