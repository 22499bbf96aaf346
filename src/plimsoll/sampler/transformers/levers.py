"""The memory lever of engines on `generate` of transformers: how much they do at once."""

from __future__ import annotations

from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.timeline.levers import Lever, Relief, halves

_SEQUENCES = "rollout.transformers.max_sequences"

LEVERS: tuple[Lever, ...] = (
    Lever(
        keys=(_SEQUENCES,),
        words="fewer sequences at once",
        cost="fewer sequences are sampled at once",
        rank=10,
        settings=lambda at: [{_SEQUENCES: n} for n in halves(at.rollout.max_sequences, 1)],
        reliefs=(Relief(("rollout engines",)),),
        engine=TransformersConfig,
        control=True,
    ),
)
