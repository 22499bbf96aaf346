"""What a job's config says of its heads, its phases and the largest forward of a rank."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.jobs import (
    DistillConfig,
    JobConfig,
    KtoConfig,
    PairJobConfig,
    PrmConfig,
    RlJobConfig,
    RmConfig,
)
from plimsoll.config.roles import RoleName, is_compared, is_precomputed, trained_roles
from plimsoll.memory.items import Phase
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape

HeadKind = Literal["policy", "value", "states"]
"""What is computed of a token: log-probs over the vocabulary, one number, or its hidden states."""


def head_of(config: JobConfig, role: RoleName) -> HeadKind:
    """Of a critic, of a reward model, and of the actor that becomes one; a teacher's head is run
    with its student's."""
    if role == "teacher":
        return "states"
    learns_scores = isinstance(config, RmConfig | PrmConfig)
    return "value" if role in ("critic", "reward") or learns_scores else "policy"


def sequences_together(config: JobConfig) -> int:
    """Sequences that are always in the same micro-batch: the two of a pair."""
    return 2 if isinstance(config, PairJobConfig) else 1


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest sequence that a forward may see."""
    new = config.rollout.sampling.max_new_tokens if isinstance(config, RlJobConfig) else 0
    return config.data.max_tokens + new


def longest_written(config: JobConfig, *, sampling: bool) -> tuple[int, str]:
    """Tokens of the longest sequence of a role, and the keys that make it so long.

    sampling: the role answers held-out prompts too, as the actor does.
    """
    longest, written = config.data.max_tokens, f"data.max_tokens = {config.data.max_tokens}"
    if not isinstance(config, RlJobConfig):
        return longest, written
    new = config.rollout.sampling.max_new_tokens
    written += f", rollout.sampling.max_new_tokens = {new}"
    if sampling and config.eval_sampling is not None:
        written += f", eval_sampling.max_new_tokens = {config.eval_sampling.max_new_tokens}"
        new = max(new, config.eval_sampling.max_new_tokens)
    return longest + new, written


def largest_pack(config: JobConfig, ranks: int) -> int:
    """Tokens of a rank's largest pack: the token budget, or all that it has of an optimizer step
    where that is less. What is only scored is packed no larger, so that it needs no more memory."""
    longest, together = longest_sequence(config), sequences_together(config)
    most = -(-step_sequences(config) // (together * ranks)) * together * longest
    return min(config.batch.micro_batch_tokens, most)


def micro_batch(config: JobConfig, ranks: int) -> MicroBatch:
    """The largest pack of a rank. A reward model learns at the end of each sequence alone."""
    longest, tokens = longest_sequence(config), largest_pack(config, ranks)
    sequences = -(-tokens // longest)
    learned = sequences if isinstance(config, RmConfig) else tokens
    shared = tokens if _shares_prompts(config) else 0
    return MicroBatch(tokens, sequences, min(longest, tokens), learned, shared)


def _shares_prompts(config: JobConfig) -> bool:
    """A response may then be a token long, and its prompt almost all of a micro-batch."""
    return isinstance(config, PairJobConfig) and config.batch.share_prompts


def step_sequences(config: JobConfig) -> int:
    """Of one optimizer step, over all ranks."""
    if isinstance(config, RlJobConfig):
        trajectories = config.batch.prompts * config.batch.responses
        return -(-trajectories // config.algorithm.mini_batches)
    return 2 * config.batch.pairs if isinstance(config, PairJobConfig) else config.batch.sequences


def bucket_bytes(config: JobConfig, shape: ModelShape) -> int:
    """Of the largest bucket of the actor's weights on its way to the engines: one tensor may be
    larger than a bucket is meant to be, and a tied head is sent beside the embedding."""
    if not isinstance(config, RlJobConfig):
        return 0
    element = config.actor.model.element
    tied = element * shape.embedding_parameters if shape.tied else 0
    largest = element * shape.largest_parameter
    whole = element * shape.parameters
    return min(max(config.rollout.sync.bucket_bytes, largest), whole) + tied


def phases(config: JobConfig) -> frozenset[Phase]:
    """Those that the job has. Evaluation by log-probs counts as scoring."""
    found: set[Phase] = {"load", "train_actor", "save"}
    if "critic" in trained_roles(config):
        found.add("train_critic")
    if isinstance(config, RlJobConfig):
        return frozenset(found | {"rollout", "score", "sync"})
    if is_precomputed(config):
        found.add("precompute")
    compared = is_compared(config) and not is_precomputed(config)
    scored = isinstance(config, KtoConfig | DistillConfig)
    if compared or scored or config.data.eval is not None:
        found.add("score")
    return frozenset(found)
