"""What one training rank can do with one model, whoever divides it over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from plimsoll.engine.steps import Steps


class Engine(Protocol):
    """A model on one rank. Every method is collective: all ranks call it, in the same order."""

    module: nn.Module

    def forward(self, *inputs: object, **options: object) -> Any:
        """What the model gives for one micro-batch; parameters as those of its own forward."""
        ...

    def scoring(self) -> AbstractContextManager[None]:
        """Within: no gradients are kept."""
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Within: these parameters whole, on every rank, by name."""
        ...


class TrainedEngine(Engine, Protocol):
    """A model that learns. steps: the optimizer steps so far."""

    steps: Steps

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share of the global mean loss."""
        ...

    def step(self, learning_rate: float) -> float:
        """Reduce over ranks, clip, update, clear; returns the gradient norm before clipping. Where
        it is not finite, nothing changes but `steps`.
        """
        ...

    def swap_average(self) -> None:
        """Exchange the weights with their moving average, where one is kept; twice: as before."""
        ...

    def save(self, directory: Path) -> None:
        """Write masters, moments and moving average."""
        ...

    def restore(self, directory: Path) -> None:
        """Read them back, whoever wrote them; in the same form, bit for bit."""
        ...
