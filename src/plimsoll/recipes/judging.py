"""The reward model's part of the reward: whole responses, scored by the training ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.jobs import PpoConfig
from plimsoll.data.packing import pack
from plimsoll.engine.worker import Worker
from plimsoll.records import RewardPart, Sample, Trajectory, from_packed

PART = "reward_model"
"""What the part is called in metrics and trajectories."""


def judge(
    trajectories: Sequence[Trajectory], config: PpoConfig, cluster: Cluster
) -> list[Trajectory]:
    """Add the reward model's score, where there is one, to each trajectory's parts."""
    if config.reward_model is None:
        return list(trajectories)
    samples = [_read_to_the_end(t) for t in trajectories]
    longest = max(len(s.tokens) for s in samples)
    packs = pack(samples, cluster.ranks, max(longest, config.batch.micro_batch_tokens))
    found = cluster.each(Worker.values, [("reward", own) for own in packs])
    flat = [p for own in packs for p in own]
    scores = from_packed(flat, [x for own in found for x in own], len(samples))
    weight = config.reward_model.weight
    return [
        replace(t, rewards=(*t.rewards, RewardPart(PART, float(score[0]), weight)))
        for t, score in zip(trajectories, scores, strict=True)
    ]


def _read_to_the_end(trajectory: Trajectory) -> Sample:
    """A value is read where a learned token is chosen. A token after the last one, which nothing
    looks at, has it read at the last one, as transformers' sequence classification does."""
    tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens, [0]])
    learned = np.zeros(len(tokens), dtype=np.bool_)
    learned[-1] = True
    return Sample(tokens, learned)
