"""What gradient checkpointing costs in time."""

from __future__ import annotations

from plimsoll.config.model import ModelConfig

ELEMENTWISE = 0.2
"""Of a forward's time, its norms, rotary embeddings and activation functions: an estimate. Of
forward and backward together, recomputing attention alone costs 2 to 4 %, and all of it 30 to 40 %
(Korthikanti et al. 2022, table 4)."""


def recomputed(model: ModelConfig) -> float:
    """What is computed again, in forwards."""
    share = {False: 0.0, "selective": ELEMENTWISE, True: 1.0}[model.gradient_checkpointing]
    return share / model.checkpoint_every
