"""How much one step sees, and how it is cut into micro-batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plimsoll.config.base import PositiveInt, Settings


class SftBatch(Settings):
    """A step of SFT."""

    sequences: PositiveInt = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""


class PreferenceBatch(Settings):
    """A step of learning from pairs."""

    pairs: PositiveInt = 32
    """Pairs (chosen and rejected) per optimizer step, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""
    share_prompts: bool = True
    """Compute a pair's prompt once: both responses attend to the same copy of it."""


class KtoBatch(Settings):
    """A step of learning from labelled responses."""

    sequences: Annotated[int, Field(ge=2)] = 32
    """Responses per optimizer step, over all ranks. The KL is measured on their prompts with other
    responses of the same step, so there must be two."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""


class RlBatch(Settings):
    """A step of PPO."""

    prompts: PositiveInt = 32
    """Prompts per step, over all ranks."""
    responses: PositiveInt = 1
    """Responses sampled for each prompt."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""
