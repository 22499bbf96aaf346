"""The engine of a reference that is the actor with its adapter switched off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from plimsoll.model.adapters import adapter_off
from plimsoll.trainer.protocol import Engine


class WithoutAdapter:
    """An `Engine` that only scores: the adapted model as it was before it learned.

    `gather` yields the adapter's parameters too, unchanged.
    """

    def __init__(self, adapted: Engine) -> None:
        self._adapted = adapted
        self.module = adapted.module

    def forward(self, *inputs: object, **options: object) -> Any:
        """Return the output of the adapted model; inside `scoring`, without the adapter."""
        return self._adapted.forward(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Switch gradients and the adapter off during the block."""
        with self._adapted.scoring(), adapter_off(self.module):
            yield

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context manager that yields the undivided parameters by name."""
        return self._adapted.gather(names)

    def sleep(self, weights: bool) -> None:
        """Do nothing: the adapted model's engine sleeps by itself."""

    def wake(self) -> None:
        """Do nothing: the adapted model's engine wakes by itself."""

    def share(self, role: str) -> None:
        """Return None, because the actor's engine counts the divided tensors."""
