"""What one training rank can do with one model, whoever divides it over the ranks, and with what
the model learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor, nn

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.engines import TRAINER_ENGINES, package_of
from plimsoll.engine.process_group import Place
from plimsoll.errors import PlimsollError
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts
from plimsoll.run.readings import Share

StreamT = TypeVar("StreamT", contravariant=True)


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

    def share(self, role: str) -> Share | None:
        """Return what this rank holds of what is divided over the ranks, for the role of this
        name; None if nothing is divided."""
        ...


class FrozenEngine(Engine, Protocol):
    """A model that only scores."""

    def release(self) -> None:
        """Let go of the weights, for good."""
        ...


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a role so far.

    taken: those that changed the weights. skipped: those whose gradient was not finite.
    in_a_row: how many of these came last, one after the other.
    """

    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def after(self, finite: bool) -> Steps:
        """The count after one more step."""
        if finite:
            return Steps(self.taken + 1, self.skipped)
        return Steps(self.taken, self.skipped + 1, self.in_a_row + 1)


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


@dataclass(frozen=True)
class TrainerBuild:
    """How a trainer engine is made on one rank, from a model that is loaded on the host.

    Attributes:
        trained: makes the engine of a role that learns.
        frozen: makes the engine of a role that only scores.
    """

    trained: Callable[[nn.Module, TrainedRole, Place], TrainedEngine]
    frozen: Callable[[nn.Module, FrozenRole, Place], FrozenEngine]


def engine_build(role: TrainedRole | FrozenRole) -> TrainerBuild:
    """Return how the engine is made that the role's settings name."""
    package = package_of(role.engine_name, TRAINER_ENGINES)
    return cast(TrainerBuild, import_module(f"{package}.engine").ENGINE)


class Objective(Protocol[StreamT]):
    """A loss with all that is the same for every micro-batch of a step."""

    def loss(
        self, engine: Engine, pack: PackTensors, stream: StreamT, counts: BatchCounts
    ) -> LossOutput:
        """The micro-batch's share of the loss; counts: of the whole step, over all ranks."""
        ...


def not_finite(norm: float, loss: float, in_a_row: int) -> PlimsollError:
    """What ends a run whose gradient norm is not finite. loss: this rank's share of the step's.
    in_a_row: how many steps have been so, one after the other."""
    times = "" if in_a_row == 1 else f", not finite in {in_a_row} steps in a row"
    return PlimsollError(
        f"the gradient norm is {norm}{times}, and this rank's share of the loss {loss:.4g}. The "
        "weights were left as they were, and earlier checkpoints are whole. Where a share is not "
        "finite, look at what the loss is computed from (a loss, an advantage or a reward of your "
        "own); where it grew in the steps before (metrics.jsonl), or is finite, lower the learning "
        "rate. optimizer.max_skipped_steps lets so many such steps in a row be left out"
    )
