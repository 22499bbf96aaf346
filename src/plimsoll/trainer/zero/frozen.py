"""The engine of a role that only scores, and functions to load, divide and gather weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.config.engine import FrozenRole, ModelConfig
from plimsoll.model.tiling import tiled_mlps
from plimsoll.run.readings import DividedShare
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.zero.config import FrozenZeroConfig
from plimsoll.trainer.zero.settings import frozen_settings
from plimsoll.trainer.zero.sleep import HostCopies, weights_of


def settle(module: nn.Module, model: ModelConfig, device: torch.device) -> None:
    """Copy the weights, mapped from files, to the device, cast to the model's dtype one by one."""
    _move_buffers(module, device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, getattr(torch, model.dtype))


def divide(
    module: nn.Module, model: ModelConfig, settings: dict[str, object], place: Place
) -> None:
    """Load the weights from their mapped files one by one: cast each, and divide it over the ranks.

    DeepSpeed's `initialize` alone would move the full model to every device first. A tiled MLP is
    gathered as a whole: ranks have different numbers of tiles, and would gather for each.
    """
    import deepspeed

    for mlp in tiled_mlps(module):
        deepspeed.utils.set_z3_leaf_module(mlp, True)
    _move_buffers(module, place.torch_device)
    parameters: list[Any] = list(module.parameters())
    first, *rest = parameters
    first.data = first.data.to(getattr(torch, model.dtype))
    deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=settings)
    for parameter in rest:
        parameter.data = parameter.data.to(getattr(torch, model.dtype))
        first.convert_to_zero_parameters(param_list=[parameter])


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the module's buffers to the device."""
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


@contextmanager
def gather_weights(
    module: nn.Module, names: Sequence[str], stage: int
) -> Iterator[dict[str, Tensor]]:
    """Yield a dict of the full parameters by name, valid inside the block only.

    At ZeRO stage 3 every rank must call it together.
    """
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
    """Return how many bytes of the weights this rank holds at stage 3.

    Small tensors, which ZeRO does not divide, are counted as if divided.
    """
    parameters: list[Any] = list(module.parameters())
    whole_bytes = sum(p.ds_numel * p.element_size() for p in parameters)
    held_bytes = sum(p.ds_tensor.numel() * p.element_size() for p in parameters)
    return DividedShare(role, "weights", whole_bytes, ranks, held_bytes)


class FrozenZeroEngine:
    """A role that only scores: a full copy on every rank, or divided by ZeRO stage 3.

    The weights are on the device always, or only while the role scores.
    """

    def __init__(self, module: nn.Module, role: FrozenRole, place: Place) -> None:
        module.requires_grad_(False).eval()
        self.module = module
        zero = role.settings_of(FrozenZeroConfig)
        self._stage, self._ranks = zero.stage, place.ranks
        self._asleep = HostCopies(place.torch_device)
        self._call: Any = module
        self._visit: Callable[[], AbstractContextManager[None]] = nullcontext
        if zero.stage == 0 and zero.offload == "cpu":
            settle(module, role.model, torch.device("cpu"))
            _move_buffers(module, place.torch_device)
            parameters = list(module.parameters())
            if place.device == "cuda":
                for parameter in parameters:
                    parameter.data = parameter.data.pin_memory()
            travel = partial(Tensor.to, device=place.torch_device, non_blocking=True)
            self._visit = partial(_visit, parameters, travel)
        elif zero.stage == 0:
            settle(module, role.model, place.torch_device)
        else:
            import deepspeed

            settings = frozen_settings(role, place.device, place.ranks)
            divide(module, role.model, settings, place)
            self._call = deepspeed.initialize(
                model=module, config=settings, dist_init_required=False
            )[0]

    def forward(self, *inputs: object, **options: object) -> Any:
        """Return the model's output for one micro-batch."""
        return self._call(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep no gradients during the block, and have the weights on the device.

        A role that is asleep wakes for the block: an evaluation scores while engines are awake.
        """
        was_asleep = bool(self._asleep)
        self.wake()
        with torch.no_grad(), self._visit():
            yield
        self.sleep(was_asleep)

    def sleep(self, weights: bool) -> None:
        """Move the weights to host memory on request: there are no states."""
        if weights:
            self._asleep.put(weights_of(self.module))

    def wake(self) -> None:
        """Move the weights back to the device."""
        self._asleep.take_back()

    def release(self) -> None:
        """Free the weights for good.

        The tensors are emptied in place, because DeepSpeed's caches (parameter_offload.py,
        FWD_MODULE_STACK; PartitionedParameterCoordinator) keep references to modules.
        """
        parameters: list[Any] = list(self.module.parameters())
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
            if self._stage == 3:
                parameter.ds_tensor.data = parameter.ds_tensor.data.new_empty(0)

    def share(self, role: str) -> DividedShare | None:
        """Return this rank's share of the weights; None if they are not divided."""
        if self._stage == 0 or self._ranks == 1:
            return None
        return share_of_weights(role, self.module, self._ranks)

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context manager that yields the full parameters by name."""
        assert not self._asleep, "weights that are asleep cannot be gathered"
        return gather_weights(self.module, names, self._stage)


@contextmanager
def _visit(
    parameters: Sequence[nn.Parameter], travel: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """During the block, replace each parameter's data by its copy on the device.

    `travel` makes the copy. Afterwards the host's data are put back; nothing is copied back,
    because frozen weights do not change.
    """
    homes = [parameter.data for parameter in parameters]
    try:
        for parameter, home in zip(parameters, homes, strict=True):
            parameter.data = travel(home)
        yield
    finally:
        for parameter, home in zip(parameters, homes, strict=True):
            parameter.data = home
