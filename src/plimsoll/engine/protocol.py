"""What one training rank can do with one model, whoever divides it over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Engine(Protocol):
    """A model on one rank. Every method is collective: all ranks call it, in the same order."""

    module: nn.Module

    def forward(self, *inputs: object) -> Tensor:
        """The model's output for one micro-batch."""
        ...

    def scoring(self) -> AbstractContextManager[None]:
        """Within: no gradients are kept."""
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Within: these parameters whole, on every rank, by name."""
        ...


class TrainedEngine(Engine, Protocol):
    """A model that learns."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share of the global mean loss."""
        ...

    def step(self, learning_rate: float) -> float:
        """Reduce over ranks, clip, update, clear; returns the gradient norm before clipping."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, masters and moments."""
        ...

    def restore(self, directory: Path) -> None:
        """Read them back, bit for bit."""
        ...


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's groups: matrices decay, vectors (norms, biases) do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
