"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from plimsoll.config.engine import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of `total_steps`.

    The rate rises linearly during warm-up. Then it stays at the peak (constant); or falls to
    `final_ratio` of the peak along a line or half a cosine; or (wsd) stays at the peak, and falls
    to that ratio during the last `decay_steps`. It gets there at the last step.
    """
    peak = config.learning_rate
    start = config.warmup(total_steps)
    if step < start:
        return peak * (step + 1) / start
    last = total_steps - 1
    if config.schedule == "wsd":
        start = max(start, last - decay_steps(config, total_steps))
    progress = (step - start) / max(1, last - start)
    shape = _shape(config, min(1.0, max(0.0, progress)))
    return peak * (config.final_ratio + (1 - config.final_ratio) * shape)


def _shape(config: OptimizerConfig, progress: float) -> float:
    """Return a factor that falls from 1 to 0 while progress goes from 0 to 1.

    wsd: 1 - sqrt, the best of the cooldowns that Haegele et al. 2024
    (https://arxiv.org/abs/2405.18392, section 3.2) compare; the name is of Hu et al. 2024
    (https://arxiv.org/abs/2404.06395).
    """
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "wsd":
            return 1 - math.sqrt(progress)


def decay_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the number of steps during which wsd falls; by default a tenth of all steps."""
    return config.decay_steps or max(1, total_steps // 10)
