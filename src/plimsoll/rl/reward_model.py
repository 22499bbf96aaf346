"""The reward model's part of the reward: whole responses, scored by the training ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.data.packing import pack
from plimsoll.engine.worker import Worker
from plimsoll.model.value import at_ends
from plimsoll.records import RewardPart, Sample, Trajectory
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.update import in_batch_order

PART = "reward_model"
"""What the part is called in metrics and trajectories."""


def score_by_model(
    trajectories: Sequence[Trajectory], spec: RunSpec[RlConfig], cluster: Cluster
) -> list[Trajectory]:
    """Add the reward model's score, where there is one, to each trajectory's parts."""
    if spec.config.reward_model is None:
        return list(trajectories)
    samples = [_to_the_end(t) for t in trajectories]
    longest = max(len(s.tokens) for s in samples)
    packs = pack(samples, cluster.ranks, max(longest, spec.workload.largest_pack(cluster.ranks)))
    found = cluster.each(Worker.values, [("reward", own, at_ends) for own in packs])
    weight = spec.config.reward_model.weight
    return [
        replace(t, rewards=(*t.rewards, RewardPart(PART, float(score), weight)))
        for t, score in zip(trajectories, in_batch_order(packs, found), strict=True)
    ]


def _to_the_end(trajectory: Trajectory) -> Sample:
    """Prompt and response, scored at the last token, as transformers' sequence classification
    does."""
    tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
    return Sample(tokens, np.arange(len(tokens)) == len(tokens) - 1)
