"""How much one step sees, and how it is cut into micro-batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plimsoll.config.base import PositiveInt, Probability, Settings


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


class DynamicSampling(Settings):
    """Groups that teach nothing are replaced by others.

    These are groups whose rewards are all equal, and those whose mean reward does not lie strictly
    between two bounds (Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, section 3.2).
    """

    by: str | None = None
    """The part of the reward that decides, by its name, such as the one that says whether an answer
    is right; default: the weighted sum of all parts."""
    low: float | None = None
    """The lower bound of a group's mean reward; default: none."""
    high: float | None = None
    """The upper bound; default: none."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Prompts that are sampled at once, as a multiple of those that are still needed."""
    max_drawn: Annotated[float, Field(ge=1)] = 4.0
    """The most prompts that a step draws in all, as a multiple of batch.prompts; after them, groups
    that teach nothing fill the batch."""


class RlBatch(Settings):
    """A step of reinforcement learning."""

    prompts: PositiveInt = 32
    """Prompts per step, over all ranks."""
    responses: PositiveInt = 1
    """Responses sampled for each prompt."""
    micro_batch_tokens: PositiveInt = 4096
    """The token budget of one forward on one rank; no pack exceeds it."""
    share_prompts: bool = False
    """Compute a prompt once for those of its responses that are in the same micro-batch."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups that teach nothing; default: they stay."""
    max_failed_groups: Probability = 0.1
    """The largest share of a step's groups whose reward may fail; such groups are replaced. At the
    first group beyond it (and beyond one group) the run stops."""
