"""How much a step sees, and how it is cut into packs; the same for every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.data import DataConfig
from plimsoll.config.run import KtoBatch, PreferenceBatch, SftBatch

Unit = Literal["sequence", "pair", "response"]
"""What a step is counted in. The two sequences of a pair are always in the same micro-batch."""


@dataclass(frozen=True)
class Workload:
    """The size of the steps of a run; lengths in tokens.

    Attributes:
        unit: what a step is counted in.
        units: units of an optimizer step, over all ranks.
        count_key: the keys that say how many, for a person to read.
        longest: the longest sequence that is learned from.
        budget: the most tokens of a micro-batch.
        length_keys: the keys that make the longest sequence so long.
        mini_batches: optimizer steps of one pass over what a step drew.
        epochs: passes over what a step drew.
        ends_only: whether the loss reads only the last token of each sequence.
        shares_prompts: whether sequences of one prompt compute it once.
        scored_with: sequences that the reference scores for each that is learned from.
    """

    unit: Unit
    units: int
    count_key: str
    longest: int
    budget: int
    length_keys: str = "data.max_tokens"
    mini_batches: int = 1
    epochs: int = 1
    ends_only: bool = False
    shares_prompts: bool = False
    scored_with: int = 1

    @property
    def together(self) -> int:
        """Sequences that are always in the same micro-batch."""
        return 2 if self.unit == "pair" else 1

    @property
    def least_budget(self) -> int:
        """The smallest budget of a micro-batch: it holds the longest sequence (or pair)."""
        return self.together * self.longest

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step, over all ranks."""
        return self.together * self.units

    @property
    def updates(self) -> int:
        """Optimizer steps of one step of the run."""
        return self.epochs * self.mini_batches

    def largest_pack(self, ranks: int) -> int:
        """Return the tokens of a rank's largest pack.

        That is the token budget, or all that the rank has of an optimizer step if that is less.
        What is only scored is packed no larger, so that it needs no more memory.
        """
        most = -(-self.units // ranks) * self.together * self.longest
        return min(self.budget, most)


def sequences_of(batch: SftBatch | KtoBatch, data: DataConfig) -> Workload:
    """Return the workload of a job that learns from single sequences."""
    return Workload(
        "sequence", batch.sequences, "batch.sequences", data.max_tokens, batch.micro_batch_tokens
    )


def pairs_of(batch: PreferenceBatch, data: DataConfig, *, ends_only: bool = False) -> Workload:
    """Return the workload of a job that learns from pairs."""
    return Workload(
        "pair",
        batch.pairs,
        "batch.pairs",
        data.max_tokens,
        batch.micro_batch_tokens,
        ends_only=ends_only,
        shares_prompts=batch.share_prompts,
    )
