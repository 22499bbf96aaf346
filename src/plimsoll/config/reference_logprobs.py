"""When the reference scores the rows that the actor learns from, and where its numbers are kept."""

from __future__ import annotations

from plimsoll.config.base import Settings, WrittenPath


class ReferenceLogprobsConfig(Settings):
    """The reference's log-probs: computed batch by batch beside the actor, or once before it."""

    precompute: bool = False
    """Score all that the run will see before the actor is loaded, and keep the numbers: the
    reference is then never in memory beside the actor and its optimizer."""
    path: WrittenPath | None = None
    """The Parquet file with the numbers; default: reference-logprobs.parquet in the run directory.
    One that is there must be of the same reference; only what it lacks is scored, and added."""
