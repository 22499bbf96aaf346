"""A rank's micro-batches, one after another: what each scores, or its loss and its gradient."""

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
"""By metric: what each micro-batch adds to it."""


def score(
    engine: Engine,
    packs: Sequence[Pack],
    forward: Callable[[PackTensors], Tensor],
    device: torch.device,
) -> list[Floats]:
    """Return what `forward`, which calls the engine's, gives for each pack: in fp32, in host
    memory, without gradients."""
    with engine.scoring():
        found = [forward(PackTensors.from_pack(pack, device)).float() for pack in packs]
    # Only after the last: see `_totals`.
    return [scores.cpu().numpy() for scores in found]


def losses(
    engine: Engine,
    packs: Sequence[Pack],
    streams: Sequence[S],
    counts: BatchCounts,
    objective: Objective[S],
    device: torch.device,
) -> Iterator[LossOutput]:
    """Of each pack as it is asked for. streams: one per pack. counts: of the step, over all
    ranks."""
    for pack, stream in zip(packs, streams, strict=True):
        yield objective.loss(engine, PackTensors.from_pack(pack, device), stream, counts)


def learn(engine: TrainedEngine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """Add up the packs' gradients; gives the rank's share of the loss and its metrics."""
    shares: Shares = {}
    for output in outputs:
        engine.backward(output.loss)
        _note(shares, output)
    return _totals(shares)


def measure(engine: Engine, outputs: Iterable[LossOutput]) -> dict[str, float]:
    """As `learn`, without gradients."""
    shares: Shares = {}
    with engine.scoring():
        for output in outputs:
            _note(shares, output)
    return _totals(shares)


def _note(shares: Shares, output: LossOutput) -> None:
    """Keep a micro-batch's numbers where they are."""
    for name, share in ({"loss": output.loss} | output.metrics).items():
        value = share.detach() if isinstance(share, torch.Tensor) else share
        shares.setdefault(name, []).append(value)


def _totals(shares: Shares) -> dict[str, float]:
    """Only after the last micro-batch: to read a number of a card, the host waits until the card
    has done all that it was given, and could not prepare the next micro-batch meanwhile."""
    return {name: sum(map(float, values), 0.0) for name, values in shares.items()}
