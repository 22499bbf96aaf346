"""The tracer against torch's own memory profiler, on real models, and its extrapolation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from traced_bytes import LiveBytes, Traced, measure, trace

WIDTH, ROWS = 256, 512


class Block(nn.Module):
    """A gated MLP with a residual, large beside what any operation keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.up(x)))
        return x + y


class Stack(nn.Module):
    def __init__(self, depth: int, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


@dataclass(frozen=True)
class Step:
    module: nn.Module

    def run(self, enter: Callable[[str], None]) -> None:
        enter("all")
        inputs = torch.zeros(ROWS, WIDTH)
        self.module(inputs).square().sum().backward()


def _on_meta(checkpointed: bool) -> Callable[[int], Step]:
    def build(depth: int) -> Step:
        with torch.device("meta"):
            return Step(Stack(depth, checkpointed))

    return build


def _profiled_peak(step: Step) -> int:
    """The highest sum of all allocations and releases that the allocator reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step.run(lambda stretch: None)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_real_model_has_the_peak_that_the_profiler_sees(checkpointed: bool) -> None:
    step = Step(Stack(4, checkpointed))
    measured = measure(step)
    step.module.zero_grad(set_to_none=False)
    assert measured.activations == pytest.approx(_profiled_peak(step), rel=0.02)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_fake_tensors_have_the_peak_of_real_ones(checkpointed: bool) -> None:
    real = measure(Step(Stack(3, checkpointed)))
    assert trace(_on_meta(checkpointed), 3, (3, 4)) == real


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_two_depths_tell_a_third(checkpointed: bool) -> None:
    deep = measure(Step(Stack(9, checkpointed)))
    assert trace(_on_meta(checkpointed), 9, (2, 3)) == deep


def test_weights_and_gradients_count_what_trains() -> None:
    module = Stack(2, checkpointed=False)
    one = 4 * (2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH)
    module.blocks[0].requires_grad_(False)
    found = measure(Step(module))
    assert (found.weights, found.gradients) == (2 * one, one)
    assert found.peak == 3 * one + found.activations


def test_a_block_without_grad_holds_by_hand_what_it_makes() -> None:
    """Input, the up projection, its silu, and the down projection or the sum: in fp32."""

    @dataclass(frozen=True)
    class Scoring(Step):
        def run(self, enter: Callable[[str], None]) -> None:
            enter("all")
            with torch.no_grad():
                self.module(torch.zeros(ROWS, WIDTH))

    one = 4 * ROWS * WIDTH
    found = measure(Scoring(Block().requires_grad_(False)))
    assert found == Traced(weights=found.weights, gradients=0, activations=one + 8 * one)


def test_tensors_without_memory_count_nothing() -> None:
    with LiveBytes() as live:
        meta, real = torch.zeros(1000, device="meta"), torch.zeros(1000)
        assert live.now == real.nbytes
    assert meta.numel() == 1000
