"""A rank's micro-batches, one after another: their scores, or their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.engine.protocol import Engine, Objective, TrainedEngine
from plimsoll.model.policy import PackTensors
from plimsoll.records import BatchCounts, Floats, Pack

S = TypeVar("S")
Shares = dict[str, list[torch.Tensor | float]]
"""The share of each micro-batch in a metric, by the metric's name."""


def score(
    engine: Engine,
    packs: Sequence[Pack],
    forward: Callable[[PackTensors], Tensor],
    device: torch.device,
) -> list[Floats]:
    """Return what `forward` gives for each pack: in fp32, in host memory, without gradients.

    `forward` calls the engine's.
    """
    with engine.scoring():
        pack_scores = [forward(PackTensors.from_pack(pack, device)).float() for pack in packs]
    # Read scores only after the last forward: see `_totals`.
    return [pack_values.cpu().numpy() for pack_values in pack_scores]


def losses(
    engine: Engine,
    packs: Sequence[Pack],
    streams: Sequence[S],
    counts: BatchCounts,
    objective: Objective[S],
    device: torch.device,
) -> Iterator[LossOutput]:
    """Yield the loss of each pack as it is asked for.

    Each pack has one of the streams. The counts are those of the step, over all ranks.
    """
    for pack, stream in zip(packs, streams, strict=True):
        yield objective.loss(engine, PackTensors.from_pack(pack, device), stream, counts)


def learn(engine: TrainedEngine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Add up the packs' gradients; return the rank's share of the loss and of its metrics."""
    shares: Shares = {}
    for output in outputs:
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
    """Keep a micro-batch's numbers on the device that they are on."""
    for name, share in ({"loss": output.loss} | output.metrics).items():
        value = share.detach() if isinstance(share, torch.Tensor) else share
        shares.setdefault(name, []).append(value)


def _totals(shares: Shares) -> dict[str, float]:
    """Return the sums, by metric; call it only after the last micro-batch.

    To read a number of a card, the host waits until the card has done all that it was given, and
    could not prepare the next micro-batch meanwhile.
    """
    return {name: sum(map(float, values), 0.0) for name, values in shares.items()}
