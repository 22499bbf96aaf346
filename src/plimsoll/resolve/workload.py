"""The size of a step and of its packs, in one form for every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.data import DataConfig
from plimsoll.config.run import KtoBatch, PreferenceBatch, SftBatch

Unit = Literal["sequence", "pair", "response"]
"""The unit in which a step is counted. Both sequences of a pair are in the same micro-batch."""


@dataclass(frozen=True)
class Workload:
    """The size of the steps of a run; lengths in tokens.

    Attributes:
        unit: the unit in which a step is counted.
        units: the units of an optimizer step, all ranks together.
        count_key: the config's keys that set `units`, as text for people.
        longest: the length of the longest sequence that is learned from.
        budget: the most tokens of a micro-batch.
        length_keys: the config's keys that set `longest`, as text for people.
        mini_batches: the optimizer steps in one pass over the data of a step of the run.
        epochs: the passes over the data of a step of the run.
        ends_only: whether the loss reads only the last token of each sequence.
        shares_prompts: whether sequences with the same prompt compute the prompt only once.
        scored_with: the sequences that the reference scores for each sequence that is learned from.
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
        """The number of sequences that must be in the same micro-batch: 2 for a pair, else 1."""
        return 2 if self.unit == "pair" else 1

    @property
    def least_budget(self) -> int:
        """The smallest budget of a micro-batch: it holds the longest sequence (or pair)."""
        return self.together * self.longest

    @property
    def sequences(self) -> int:
        """The sequences of one optimizer step, all ranks together."""
        return self.together * self.units

    @property
    def updates(self) -> int:
        """The optimizer steps in one step of the run."""
        return self.epochs * self.mini_batches

    def largest_pack(self, ranks: int) -> int:
        """Return the tokens of the largest pack of a rank.

        That is the token budget, or all tokens of the rank in an optimizer step if these are fewer.
        Packs that are only scored are no larger, so they need no more memory.
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
