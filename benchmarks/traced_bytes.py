"""Activations and gradients of one micro-batch, measured on the true architecture without weights.

Fake tensors (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html) have shapes and
storages but no bytes, so autograd saves and frees what it would in a real run. Two shallow copies
of a model are run and what they show is extrapolated to the whole depth.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Traced:
    """What one micro-batch holds at its highest point, in bytes.

    weights: of the whole model. gradients: one for each trained weight, in its dtype.
    activations: all else: saved tensors, working set, logits, gradients in flight.
    """

    weights: int
    gradients: int
    activations: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.activations


class Traceable(Protocol):
    """A model and one micro-batch of it."""

    @property
    def module(self) -> nn.Module: ...

    def run(self, enter: Callable[[str], None]) -> None:
        """Forward, and backward where it trains. `enter` tells that a stretch of it begins.

        Within a stretch the peak must grow evenly with the number of layers, or the two depths do
        not say what more layers would do.
        """


def trace(build: Callable[[int], Traceable], layers: int, depths: tuple[int, int]) -> Traced:
    """Run models of two depths on fake tensors, and extrapolate to `layers`.

    build: makes the model with that many layers on the meta device, and its micro-batch.
    """
    shallow, deep = (_read_fake(build, depth) for depth in depths)
    parts = (layers - depths[0]) / (depths[1] - depths[0])
    return _along(shallow, deep, parts).traced()


def measure(traceable: Traceable) -> Traced:
    """As `trace`, of the very model that is given, which may be real."""
    with LiveBytes() as live:
        return _read(traceable, live).traced()


@dataclass(frozen=True)
class _Reading:
    """Bytes of one depth. peaks: beyond weights and gradients, by stretch."""

    weights: int
    gradients: int
    peaks: Mapping[str, int]

    def traced(self) -> Traced:
        return Traced(self.weights, self.gradients, max(self.peaks.values()))


def _along(a: _Reading, b: _Reading, parts: float) -> _Reading:
    """On the line through a and b, `parts` of their distance from a."""

    def at(x: int, y: int) -> int:
        return round(x + (y - x) * parts)

    peaks = {stretch: at(peak, b.peaks[stretch]) for stretch, peak in a.peaks.items()}
    return _Reading(at(a.weights, b.weights), at(a.gradients, b.gradients), peaks)


def _read_fake(build: Callable[[int], Traceable], depth: int) -> _Reading:
    traceable = build(depth)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        _from_meta_to_cpu(traceable.module)
        return _read(traceable, live)


def _from_meta_to_cpu(module: nn.Module) -> None:
    """Give every parameter and buffer a storage; Module.to cannot, under fake tensors."""
    made: dict[Tensor, Tensor] = {}
    tables: list[dict[str, Any]] = [
        table for part in module.modules() for table in (part._parameters, part._buffers)
    ]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                made[tensor] = made[tensor] if tensor in made else _on_cpu(tensor)
                table[name] = made[tensor]


def _on_cpu(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _read(traceable: Traceable, live: LiveBytes) -> _Reading:
    """Gradients are there from the start, as in any micro-batch of a step but the first."""
    module = traceable.module
    for tensor in (*module.parameters(), *module.buffers()):
        live.count(tensor)
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    before = live.now
    traceable.run(live.enter)
    return _Reading(
        weights=_bytes(list(module.parameters())),
        gradients=_bytes(trained),
        peaks={stretch: peak - before for stretch, peak in live.peaks.items()},
    )


def _bytes(tensors: list[nn.Parameter]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class LiveBytes(TorchDispatchMode):
    """While it is active, counts the bytes of all storages that operations make, until they go.

    now: bytes that live. peaks: the highest of `now` in each stretch that was entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peaks: dict[str, int] = {}
        self._stretch: str | None = None
        self._storages: set[int] = set()

    def enter(self, stretch: str) -> None:
        """Begin a stretch with a name of its own."""
        self._stretch = stretch
        self.peaks[stretch] = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        if self._stretch is not None:
            self.peaks[self._stretch] = max(self.now, self.peaks[self._stretch])
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is not yet; on the meta device there is
        none."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.now += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.now -= size
