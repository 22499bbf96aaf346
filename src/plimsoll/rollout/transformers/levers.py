"""The memory lever of engines on `generate` of transformers: how much they do at once."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.rollout.transformers.config import TransformersConfig
from plimsoll.timeline.levers import Lever, Move, Situation, halves, relief

_SEQUENCES = "rollout.transformers.max_sequences"


def _fewer_sequences(at: Situation) -> Sequence[Move]:
    return [{_SEQUENCES: count} for count in halves(at.rollout.max_sequences, 1)]


FEWER_SEQUENCES = Lever(
    keys=(_SEQUENCES,),
    words="fewer sequences at once",
    cost="fewer sequences are sampled at once",
    rank=10,
    settings=_fewer_sequences,
    reliefs=(relief("rollout engines"),),
    engine=TransformersConfig,
    control=True,
)

LEVERS: tuple[Lever, ...] = (FEWER_SEQUENCES,)
