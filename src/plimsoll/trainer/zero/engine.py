"""The engine on DeepSpeed ZeRO: stages 0 to 3, offload, fp32 masters, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.config.engine import TrainedRole
from plimsoll.run.readings import DividedShare
from plimsoll.trainer.checkpoint import (
    CheckpointFile,
    block_file,
    read_blocks,
    read_rows,
    row_files,
)
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.protocol import Steps, TrainerBuild
from plimsoll.trainer.zero.abandon import abandon_step, guard_collectives
from plimsoll.trainer.zero.config import ZeroConfig
from plimsoll.trainer.zero.form import Form, check_shapes, form_file, read_form, shapes_file
from plimsoll.trainer.zero.frozen import (
    FrozenZeroEngine,
    divide,
    gather_weights,
    settle,
    share_of_weights,
)
from plimsoll.trainer.zero.masters import Average, find_masters
from plimsoll.trainer.zero.optimizer import (
    begin_moments,
    forget_dry_step,
    forget_gradients,
    make_optimizer,
    moment_rows,
)
from plimsoll.trainer.zero.settings import deepspeed_settings
from plimsoll.trainer.zero.sleep import HostCopies, buckets_of, states_of, weights_of

_DTYPE_NAMES = {2: "bf16", 4: "fp32"}
"""The names of dtypes in the plan, by their bytes."""


class ZeroEngine:
    """A trained role, divided by DeepSpeed as its `zero` settings say."""

    def __init__(self, module: nn.Module, role: TrainedRole, place: Place) -> None:
        import deepspeed

        self._role = role
        self._zero = role.settings_of(ZeroConfig)
        self._place = place
        self._form = Form.of(role, place.ranks)
        settings = deepspeed_settings(role, place.device, place.ranks)
        # It groups weights by shape, so call it before dividing.
        optimizer = make_optimizer(module, role)
        if self._zero.stage == 3:
            divide(module, role.model, settings, place)
        else:
            settle(module, role.model, place.torch_device)
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        self.module = module
        forget_dry_step(self._engine.optimizer)
        self._masters = find_masters(module, self._engine.optimizer, self._zero.stage, place.rank)
        self.steps = Steps()
        self._average: Average | None = None
        if role.ema is not None:
            self._average = Average(self._masters.flat(), role.ema.decay)
        self._states_asleep = HostCopies(place.torch_device)
        self._weights_asleep = HostCopies(place.torch_device)

    def sleep(self, weights: bool) -> None:
        """Move states, and on request the weights, to host memory."""
        if self._zero.stage == 3:
            self._engine.optimizer.empty_partition_cache()  # divided weights alone are moved
        averages = [] if self._average is None else self._average.rows
        optimizer = self._engine.optimizer
        states = (*states_of(self.module, optimizer), *averages)
        self._states_asleep.put(states, unused=buckets_of(optimizer))
        if weights:
            self._weights_asleep.put(weights_of(self.module))

    def wake(self) -> None:
        """Move weights and states back to the device."""
        self._weights_asleep.take_back()
        self._states_asleep.take_back()

    @property
    def _is_awake(self) -> bool:
        return not (self._weights_asleep or self._states_asleep)

    def forward(self, *inputs: object, **options: object) -> Any:
        """Return the model's output for one micro-batch."""
        assert not self._weights_asleep, "a forward pass of weights that are asleep"
        return self._engine(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep no gradients during the block."""
        self._engine.eval()
        with torch.no_grad():
            yield
        self._engine.train()
        if self._zero.stage == 3:
            # Once it has trained, DeepSpeed keeps up to stage3_max_reuse_distance weights gathered
            # for a backward pass, and scoring has none.
            self._engine.optimizer.empty_partition_cache()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share of the global mean loss."""
        # DeepSpeed averages gradients over the ranks, but shares of a global mean must be added.
        self._engine.backward(loss * self._place.ranks, scale_wrt_gas=False)

    def guard_collectives(
        self, around: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return a context manager that runs each collective in the block inside `around()`."""
        return guard_collectives(around)

    def abandon_step(self) -> None:
        """Drop all gradients since the last step, after a forward or backward pass that failed."""
        abandon_step(self.module, self._engine.optimizer, self._zero.stage)

    def step(self, learning_rate: float) -> float:
        """Update the weights; return the gradient norm before clipping."""
        assert self._is_awake, "a step of states that are asleep"
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._update()
        self.steps = self.steps.after(math.isfinite(norm))
        if self._average is not None and math.isfinite(norm):
            self._average.add(self._masters.flat(), self.steps.taken)
        return norm

    def _update(self) -> float:
        """Update the weights if the gradient is finite; return its norm, the same on all ranks.

        If it is not, weights and moments stay as they are.
        """
        if self._zero.stage > 0 or self._role.model.dtype != "float32":
            # DeepSpeed takes the norm, and leaves out a step that is not finite.
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            if not math.isfinite(norm):
                forget_gradients(self._engine.optimizer)
            return norm
        # With these settings DeepSpeed does not wrap the optimizer and reports no norm. So the norm
        # is taken here, after reducing the gradients, just before the update. Not by
        # allreduce_gradients(), which reduces only while DeepSpeed's own step() runs.
        self._engine.buffered_allreduce_fallback()
        self._engine.enable_backward_allreduce = False  # step() must not reduce once more
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(norm):
            self._engine.step()
        else:
            self.module.zero_grad()
        return norm

    def masters(self) -> list[Tensor]:
        """Return the tensors that this rank's optimizer updates: at stages 1 to 3 its share."""
        return list(self._masters.tensors)

    def share(self, role: str) -> DividedShare | None:
        """Return this rank's share of the weights (stage 3) or of the masters (stages 1 and 2)."""
        if self._zero.stage == 0 or self._place.ranks == 1:
            return None
        if self._zero.stage == 3:
            return share_of_weights(role, self.module, self._place.ranks)
        trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        masters = self.masters()
        each, held_bytes = masters[0].element_size(), sum(master.nbytes for master in masters)
        what = f"{_DTYPE_NAMES[each]} masters"
        return DividedShare(role, what, each * trained, self._place.ranks, held_bytes)

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context manager that yields the undivided parameters by name."""
        assert not self._weights_asleep, "weights that are asleep cannot be gathered"
        return gather_weights(self.module, names, self._zero.stage)

    @torch.no_grad()
    def swap_average(self) -> None:
        """Exchange the weights with their moving average, if one is kept."""
        if self._average is not None:
            assert self._is_awake, "weights and averages are exchanged awake"
            self._average.swap(self._masters.flat())
            self._masters.spread()

    def checkpoint_files(self) -> Iterator[CheckpointFile]:
        """Yield files of masters, moments and moving average, and the form and shapes of the role.

        Each file is copied to host memory when it is taken.
        """
        if self._place.rank == 0:
            yield form_file(self._form, self.steps)
            yield shapes_file(self.module)
        if self._place.rank > 0 and self._zero.stage == 0:
            return  # all ranks hold the same
        masters = self._masters
        kept = self._rows() | moment_rows(masters.optimizer, masters.tensors)
        rows = {kind: [*map(self._readable, tensors)] for kind, tensors in kept.items()}
        yield from row_files(rows, masters.parts, self._place.rank)
        if self._has_block_moments:
            states = (masters.optimizer.state[master] for master in masters.tensors)
            tensors = [{k: v for k, v in s.items() if isinstance(v, Tensor)} for s in states]
            readable = [{k: self._readable(v) for k, v in held.items()} for held in tensors]
            yield block_file(readable, self._place.rank)

    def _readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor that can be read; if it is asleep, its copy on the host."""
        return self._states_asleep.readable(self._weights_asleep.readable(tensor))

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Load masters, moments and moving average, and write the masters into the model's weights.

        Raises:
            ConfigError: The checkpoint is damaged, or of another model or other settings.
        """
        assert self._is_awake, "a checkpoint is read into states that are awake"
        self.steps = read_form(self._form, directory)
        check_shapes(self.module, directory)
        masters = self._masters
        rows = self._rows()
        if self._has_block_moments:
            states = read_blocks(directory, self._place.rank if self._zero.stage > 0 else 0)
            for number, master in enumerate(masters.tensors):
                state = masters.optimizer.state[master]
                state.clear()
                if number in states:
                    state |= {name: t.to(master.device) for name, t in states[number].items()}
                    state["step"] = self.steps.taken
        else:
            rows |= begin_moments(masters.optimizer, masters.tensors, self.steps.taken)
        read_rows(rows, masters.parts, directory)
        masters.spread()

    def _rows(self) -> dict[str, Sequence[Tensor]]:
        rows: dict[str, Sequence[Tensor]] = {"master": self._masters.flat()}
        return rows if self._average is None else rows | {"average": self._average.rows}

    @property
    def _has_block_moments(self) -> bool:
        """Whether moments are in 8 bits, with scales of blocks."""
        return self._role.optimizer.kind == "adamw_8bit"


ENGINE = TrainerBuild(trained=ZeroEngine, frozen=FrozenZeroEngine)
