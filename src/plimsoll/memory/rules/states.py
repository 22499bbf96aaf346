"""Rules about what trained roles keep and exchange."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import ZeroConfig
from plimsoll.config.problems import Problem
from plimsoll.memory.contents.contents import Job

LOST_BELOW = 2.0**-14
"""Half the distance of bfloat16 numbers about 0.02, the spread that transformers gives new weights
(`initializer_range`): AdamW moves a weight by about the learning rate, and what is less than that
half is rounded away."""


def lost_updates(job: Job) -> Iterator[Problem]:
    """States in bfloat16."""
    for name, role in job.spec.trained.items():
        rate = role.optimizer.learning_rate
        if role.zero.state_dtype == "bfloat16" and rate < LOST_BELOW:
            what = f"{name}.zero.state_dtype is bfloat16, and "
            what += f"{name}.optimizer.learning_rate {rate:g}"
            why = "bfloat16 numbers about 0.02, as weights are, lie 1.2e-4 apart; AdamW moves a "
            why += "weight by about the learning rate, and what is under half of that is rounded "
            why += "away"
            fix = f"{name}.zero.state_dtype: float32 (in host memory, with "
            fix += f"{name}.zero.optimizer_offload: cpu), or a rate of 1e-4 and more"
            yield Problem("lost-updates", "warning", what, why, fix)


def zero_plus_plus(job: Job) -> Iterator[Problem]:
    """Of a run on the CPU."""
    for name, role in job.spec.trained.items():
        asked = [f"{name}.zero.{key}" for key in _asked(role.zero)]
        if asked and job.device == "cpu":
            what = f"{', '.join(asked)}: the run is on the CPU"
            why = "DeepSpeed quantises with CUDA kernels, and within a machine there is no slow "
            why += "link to spare"
            fix = "leave it out, or cluster.device: cuda"
            yield Problem("zero-plus-plus", "error", what, why, fix)


def _asked(zero: ZeroConfig) -> Iterator[str]:
    if zero.quantized_weights:
        yield "quantized_weights"
    if zero.quantized_gradients:
        yield "quantized_gradients"
    if zero.hpz_partition_size > 1:
        yield "hpz_partition_size"
