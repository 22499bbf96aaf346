"""The job of `plimsoll sample`: the rollouts of reinforcement learning alone.

sample_loop.py runs it.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll.jobs.rl import JOB as RL
from plimsoll.jobs.rl import reward_models
from plimsoll.resolve.job import alone, both
from plimsoll.resolve.rules.sampling import check_sampling

JOB = replace(
    RL,
    name="sample",
    summary="sample and score, without learning",
    roles=reward_models,
    loop="plimsoll.jobs.sample_loop",
    choices=lambda config: {},
    rules=check_sampling,
    panels=(
        both("Reward", "per response", "reward"),
        alone("Length of responses", "tokens per response", "response_tokens"),
    ),
)
