"""A rank's micro-batches, one after another: their scores, or their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.machine.faults import fault_point, fault_value
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats, Pack
from plimsoll.trainer.protocol import Engine, Objective, PackToLearn, TrainedEngine

S = TypeVar("S")
Shares = dict[str, list[torch.Tensor | float]]
"""For each metric's name, the shares of the micro-batches."""


def score(
    engine: Engine,
    packs: Iterable[Pack],
    forward: Callable[[PackTensors], Tensor],
    device: torch.device,
) -> list[Floats]:
    """Return the result of `forward` for each pack: fp32, in host memory, without gradients.

    `forward` calls the engine's `forward`.
    """
    with engine.scoring():
        pack_scores = [forward(PackTensors.from_pack(pack, device)).float() for pack in packs]
    # Read scores only after the last forward: see `_totals`.
    return [pack_values.cpu().numpy() for pack_values in pack_scores]


def losses(
    engine: Engine,
    packs: Iterable[Pack],
    streams: Sequence[S],
    counts: BatchCounts,
    objective: Objective[S],
    device: torch.device,
) -> Iterator[LossOutput]:
    """Yield the loss and metrics of each pack, computed when the caller asks for them.

    `streams`: one per pack. `counts`: the counts of the optimizer step, over all ranks.
    """
    for pack, stream in zip(packs, streams, strict=True):
        # Nothing has a name here: it would be held while the next micro-batch is computed.
        yield fault_value(
            "rank.forward",
            objective.loss(engine, PackToLearn(pack, stream, counts, device)),
        )


def learn(engine: TrainedEngine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Add up the gradients of the losses; return the rank's share of the loss and metrics."""
    shares: Shares = {}
    for output in outputs:
        fault_point("rank.backward")
        engine.backward(output.loss)
        _add_shares(shares, output)
    return _totals(shares)


def measure(engine: Engine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Return the rank's share of the loss and of its metrics, without gradients."""
    shares: Shares = {}
    with engine.scoring():
        for output in outputs:
            _add_shares(shares, output)
    return _totals(shares)


def _add_shares(shares: Shares, output: LossOutput) -> None:
    """Add a micro-batch's loss and metrics to `shares`; tensors stay on their device."""
    for name, share in ({"loss": output.loss} | output.metrics).items():
        value = share.detach() if isinstance(share, torch.Tensor) else share
        shares.setdefault(name, []).append(value)


def _totals(shares: Shares) -> dict[str, float]:
    """Return the sums, by metric; call it only after the last micro-batch.

    To read a number from a card, the host waits until the card has done all queued work. Meanwhile
    it could not prepare the next micro-batch.
    """
    return {name: sum(map(float, values), 0.0) for name, values in shares.items()}
