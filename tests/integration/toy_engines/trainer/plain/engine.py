"""The engine itself: stochastic gradient descent with momentum, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.run.readings import DividedShare
from plimsoll.trainer.checkpoint import CheckpointFile
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.protocol import Steps, TrainerBuild

from .config import PlainConfig

_FILE = "plain.safetensors"


class PlainFrozenEngine:
    """A `FrozenEngine`: the whole model on each rank."""

    def __init__(self, module: nn.Module, role: TrainedRole | FrozenRole, place: Place) -> None:
        self._place = place
        self.module = module.to(place.torch_device, getattr(torch, role.model.dtype))
        self._asleep: list[tuple[Tensor, Tensor]] = []
        """Each tensor that is empty now, with the copy of what it held."""

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
        self._empty(self.module.parameters() if weights else ())

    def _empty(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel() > 0:
                self._asleep.append((tensor, tensor.detach().to("cpu", copy=True)))
                tensor.data = tensor.data.new_empty(0)

    def wake(self) -> None:
        for tensor, copy in self._asleep:
            tensor.data = copy.to(self._place.torch_device)
        self._asleep.clear()

    def share(self, role: str) -> DividedShare | None:
        return None

    def release(self) -> None:
        for parameter in self.module.parameters():
            parameter.data = parameter.data.new_empty(0)


class PlainEngine(PlainFrozenEngine):
    """A `TrainedEngine`: each rank holds all weights and states, and takes the same steps."""

    def __init__(self, module: nn.Module, role: TrainedRole, place: Place) -> None:
        super().__init__(module, role, place)
        self.steps = Steps()
        self._clip_at = role.optimizer.max_grad_norm
        momentum = role.settings_of(PlainConfig).momentum
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0, momentum=momentum)

    def sleep(self, weights: bool) -> None:
        super().sleep(weights)
        self._empty(self._momenta().values())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self._place.ranks > 1:
                dist.all_reduce(gradient)
            parameter.grad = gradient
        norm = nn.utils.get_total_norm(gradients)
        if math.isfinite(norm):
            nn.utils.clip_grads_with_norm_(parameters, self._clip_at, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps = self.steps.after(math.isfinite(norm))
        return float(norm)

    def guard_collectives(
        self, around: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Do nothing: no collective is in a forward or backward pass."""
        return nullcontext()

    def abandon_step(self) -> None:
        self._optimizer.zero_grad()

    def swap_average(self) -> None:
        """Do nothing: no average is kept."""

    def checkpoint_files(self) -> Iterator[CheckpointFile]:
        if self._place.rank > 0:
            return  # all ranks hold the same
        copies = {id(tensor): copy for tensor, copy in self._asleep}
        held: dict[str, Tensor] = {f"weight/{n}": p for n, p in self.module.named_parameters()}
        held |= {f"momentum/{name}": momentum for name, momentum in self._momenta().items()}
        tensors = {n: copies.get(id(t), t).detach().to("cpu", copy=True) for n, t in held.items()}
        taken = torch.tensor([self.steps.taken, self.steps.skipped, self.steps.in_a_row])
        yield CheckpointFile(_FILE, {**tensors, "steps": taken})

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        stored = load_file(directory / _FILE, self._place.device)
        self.steps = Steps(*map(int, stored["steps"]))
        for name, parameter in self.module.named_parameters():
            parameter.copy_(stored[f"weight/{name}"])
            if (momentum := stored.get(f"momentum/{name}")) is not None:
                self._optimizer.state[parameter]["momentum_buffer"] = momentum

    def _momenta(self) -> dict[str, Tensor]:
        """Return the momentum of each weight by its name; there is none before the first step."""
        states = {name: self._optimizer.state[p] for name, p in self.module.named_parameters()}
        return {n: s["momentum_buffer"] for n, s in states.items() if "momentum_buffer" in s}


ENGINE = TrainerBuild(trained=PlainEngine, frozen=PlainFrozenEngine)
