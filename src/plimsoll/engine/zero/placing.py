"""A model's weights on their way from files to the device, divided or whole, and whole again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.config.model import ModelConfig
from plimsoll.engine.process_group import Place
from plimsoll.run.readings import DividedShare


def settle(module: nn.Module, model: ModelConfig, device: torch.device) -> None:
    """Take the weights from the files that they are mapped from to the device, one by one."""
    move_buffers(module, device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, getattr(torch, model.dtype))


def divide(
    module: nn.Module, model: ModelConfig, settings: dict[str, object], place: Place
) -> None:
    """Take the weights from their files to the device, one by one, each divided over the ranks.

    The files are mapped. DeepSpeed's `initialize` alone would move the whole model to every device
    first.
    """
    import deepspeed

    move_buffers(module, place.torch_device)
    parameters: list[Any] = list(module.parameters())
    first, *rest = parameters
    first.data = first.data.to(getattr(torch, model.dtype))
    deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=settings)
    for parameter in rest:
        parameter.data = parameter.data.to(getattr(torch, model.dtype))
        first.convert_to_zero_parameters(param_list=[parameter])


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the module's buffers to the device."""
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


@contextmanager
def gather_weights(
    module: nn.Module, names: Sequence[str], stage: int
) -> Iterator[dict[str, Tensor]]:
    """Yield these parameters whole, by name; collective at stage 3."""
    requested = set(names)
    parameters = {n: p for n, p in module.named_parameters() if n in requested}
    assert len(parameters) == len(requested), f"no such parameters: {requested - parameters.keys()}"
    if stage < 3:
        yield {name: parameters[name].detach() for name in names}
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        yield {name: parameters[name].detach() for name in names}


def share_of_weights(role: str, module: nn.Module, ranks: int) -> DividedShare:
    """Return a rank's share of weights that stage 3 divides.

    The tensors that ZeRO keeps whole, being small, count as their shares.
    """
    parameters: list[Any] = list(module.parameters())
    whole_bytes = sum(p.ds_numel * p.element_size() for p in parameters)
    held_bytes = sum(p.ds_tensor.numel() * p.element_size() for p in parameters)
    return DividedShare(role, "weights", whole_bytes, ranks, held_bytes)
