"""The interfaces of training: an engine (one model on one rank) and an objective (its loss)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.errors import PlimsollError
from plimsoll.model.policy import PackTensors, ReadAt, before_learned
from plimsoll.records import BatchCounts, Column, Pack, PackColumns
from plimsoll.run.readings import DividedShare
from plimsoll.trainer.checkpoint import CheckpointFile
from plimsoll.trainer.process_group import Place


class Engine(Protocol):
    """A model on one rank. Every method is collective: all ranks call it, in the same order."""

    module: nn.Module

    def forward(self, *inputs: object, **options: object) -> Any:
        """Return the model's output for one micro-batch; arguments as in the model's `forward`."""

    def scoring(self) -> AbstractContextManager[None]:
        """Return a context manager inside which no gradients are kept."""

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context manager that yields the undivided parameters by name, on every rank.

        Use the tensors inside the block only.
        """

    def sleep(self, weights: bool) -> None:
        """Move what stays on the device between two steps to host memory, until `wake`.

        `weights`: move the weights too; else only the states of a model that learns. What is asleep
        already stays asleep.
        """

    def wake(self) -> None:
        """Move everything back, bit for bit; do nothing if nothing is asleep."""

    def share(self, role: str) -> DividedShare | None:
        """Return how much this rank holds of divided tensors; None if nothing is divided.

        `role`: the name of the role that the engine serves.
        """


class FrozenEngine(Engine, Protocol):
    """A model that only scores."""

    def release(self) -> None:
        """Free the weights for good."""


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a role so far.

    Attributes:
        taken: Steps that changed the weights.
        skipped: Steps whose gradient was not finite.
        in_a_row: How many of the latest steps in succession were skipped.
    """

    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def after(self, finite: bool) -> Steps:
        """Return the counts after one more step; `finite` says whether its gradient was finite."""
        if finite:
            return Steps(self.taken + 1, self.skipped)
        return Steps(self.taken, self.skipped + 1, self.in_a_row + 1)


class TrainedEngine(Engine, Protocol):
    """A model that learns.

    Attributes:
        steps: The optimizer steps so far.
    """

    steps: Steps

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share of the global mean loss."""

    def step(self, learning_rate: float) -> float:
        """Take one optimizer step; return the norm of the full gradient before clipping.

        Gradients are reduced over the ranks and clipped, and cleared after the update. If the norm
        is not finite, nothing changes but `steps`.
        """

    def guard_collectives(
        self, around: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return a context manager that runs each collective in the block inside `around()`.

        If `around` raises, the collective is not begun, and the error leaves the pass that asked
        for it.
        """

    def abandon_step(self) -> None:
        """Drop all gradients since the last step, after a forward or backward pass that failed.

        The failed pass may have ended anywhere, on each rank elsewhere, but in no collective.
        Weights, states and `steps` stay as they are.
        """

    def swap_average(self) -> None:
        """Exchange the weights with their moving average, if one is kept.

        A second call brings the weights back.
        """

    def checkpoint_files(self) -> Iterator[CheckpointFile]:
        """Yield the files of masters, moments and moving average, asleep or awake.

        Each file is copied to host memory when it is taken; later steps do not change it.
        """

    def restore(self, directory: Path) -> None:
        """Load the files of `checkpoint_files`, also those of other ranks in another division.

        If the role was divided in the same way, the values are restored bit for bit.
        """


@dataclass(frozen=True)
class TrainerBuild:
    """The functions that build a trainer engine on one rank, from a model loaded on the host.

    Attributes:
        trained: Makes the engine of a role that learns.
        frozen: Makes the engine of a role that only scores.
    """

    trained: Callable[[nn.Module, TrainedRole, Place], TrainedEngine]
    frozen: Callable[[nn.Module, FrozenRole, Place], FrozenEngine]


def engine_build(role: TrainedRole | FrozenRole) -> TrainerBuild:
    """Return the build functions of the engine that the role's settings name."""
    return cast(TrainerBuild, role.engine_value("engine"))


@dataclass(frozen=True)
class PackToLearn:
    """A micro-batch with all that its loss is computed from, in host memory.

    Attributes:
        pack: The tokens.
        columns: The numbers besides them, such as advantages.
        counts: The counts of the full optimizer step, over all ranks.
        device: Where the model is.
    """

    pack: Pack
    columns: PackColumns
    counts: BatchCounts
    device: torch.device

    def send(self) -> PackTensors:
        """Return the tokens on the device."""
        return PackTensors.from_pack(self.pack, self.device)

    def send_with_columns(
        self, read_at: ReadAt = before_learned
    ) -> tuple[PackTensors, dict[Column, Tensor]]:
        """Return the tokens and the columns on the device, both by one copy."""
        return PackTensors.with_columns(self.pack, self.columns, self.device, read_at)


class Objective(Protocol):
    """A loss with its settings, which are the same for every micro-batch of a step."""

    def loss(self, engine: Engine, micro_batch: PackToLearn) -> LossOutput:
        """Return the micro-batch's share of the loss and of the metrics."""


def not_finite_error(norm: float, loss: float, in_a_row: int) -> PlimsollError:
    """Return the error that ends a run whose gradient norm is not finite.

    `loss`: this rank's share of the step's loss. `in_a_row`: how many such steps came in
    succession.
    """
    times = "" if in_a_row == 1 else f", not finite in {in_a_row} steps in a row"
    return PlimsollError(
        f"the gradient norm is {norm}{times}, and this rank's share of the loss {loss:.4g}. The "
        "weights were left as they were, and earlier checkpoints are whole. Where a share is not "
        "finite, look at what the loss is computed from (a loss, an advantage or a reward of your "
        "own); where it grew in the steps before (metrics.jsonl), or is finite, lower the learning "
        "rate. optimizer.max_skipped_steps lets so many such steps in a row be left out"
    )
