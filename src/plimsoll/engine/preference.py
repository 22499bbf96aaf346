"""The loss of packs of pairs under an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.algorithm.sequences import lengths, sums
from plimsoll.config.base import Choice
from plimsoll.engine.protocol import Engine
from plimsoll.engine.streams import PreferenceStream
from plimsoll.model.policy import PackTensors
from plimsoll.records import Pack


@dataclass(frozen=True)
class PreferenceObjective:
    """The loss on pairs with everything but the batch: crosses to the ranks with every step."""

    loss: Choice
    nll_weight: float


def preference_losses(
    engine: Engine,
    packs: Sequence[Pack],
    streams: Sequence[PreferenceStream],
    pairs: int,
    objective: PreferenceObjective,
    device: torch.device,
) -> Iterator[LossOutput]:
    """The loss of each pack, one forward at a time; pairs: of the whole step."""
    loss = preference_loss(objective.loss)
    for pack, stream in zip(packs, streams, strict=True):
        tensors = PackTensors.from_pack(pack, device)
        logprobs_L, _ = engine.forward(tensors, False)
        yield preference_objective(
            _inputs(logprobs_L, tensors.cu_learned, pairs),
            _reference(stream, device),
            loss.compute,
            objective.nll_weight,
        )


def _inputs(logprobs_L: Tensor, cu_learned: Tensor, pairs: int) -> PreferenceLossInputs:
    return PreferenceLossInputs(
        logprobs=in_pairs(sums(logprobs_L, cu_learned)),
        lengths=in_pairs(lengths(cu_learned).float()),
        pairs=pairs,
    )


def _reference(stream: PreferenceStream, device: torch.device) -> PairValues | None:
    if stream.reference_logprobs_S is None:
        return None
    return in_pairs(torch.tensor(stream.reference_logprobs_S, device=device))
