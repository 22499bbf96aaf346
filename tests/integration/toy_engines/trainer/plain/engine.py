"""The engine itself: stochastic gradient descent with momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from plimsoll.trainer.plain.config import PlainConfig
from torch import Tensor, nn

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.run.readings import DividedShare
from plimsoll.trainer.checkpoint import CheckpointFile
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.protocol import Steps, TrainerBuild


class _Plain:
    def __init__(self, module: nn.Module, role: TrainedRole | FrozenRole, place: Place) -> None:
        self.module = module.to(place.torch_device, getattr(torch, role.model.dtype))

    def forward(self, *inputs: object, **options: object) -> Any:
        return self.module(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self.module.eval()
        with torch.no_grad():
            yield
        self.module.train()

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        parameters = dict(self.module.named_parameters())
        yield {name: parameters[name].detach() for name in names}

    def sleep(self, weights: bool) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def share(self, role: str) -> DividedShare | None:
        return None

    def release(self) -> None:
        for parameter in self.module.parameters():
            parameter.data = parameter.data.new_empty(0)


class PlainEngine(_Plain):
    def __init__(self, module: nn.Module, role: TrainedRole, place: Place) -> None:
        super().__init__(module, role, place)
        self.steps = Steps()
        momentum = role.settings_of(PlainConfig).momentum
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0, momentum=momentum)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps = self.steps.after(math.isfinite(norm))
        return norm

    def guard_collectives(
        self, around: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """One rank has no collectives."""
        return nullcontext()

    def abandon_step(self) -> None:
        self._optimizer.zero_grad()

    def swap_average(self) -> None:
        """No average is kept."""

    def checkpoint_files(self) -> Iterator[CheckpointFile]:
        states = self._optimizer.state.values()
        momenta = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        tensors = {str(number): momentum.clone() for number, momentum in enumerate(momenta)}
        yield CheckpointFile("momentum.safetensors", tensors)

    def restore(self, directory: Path) -> None:
        raise NotImplementedError


ENGINE = TrainerBuild(trained=PlainEngine, frozen=_Plain)
