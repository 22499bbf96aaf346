"""What a job's config says of its roles, phases and the largest forward of a rank."""

from __future__ import annotations

from typing import Literal, assert_never

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import DpoConfig, JobConfig, PpoConfig, SftConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.reference import needs_reference
from plimsoll.memory.items import Phase
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape

RoleName = Literal["actor", "critic", "reference", "reward"]


def trained_roles(config: JobConfig) -> dict[RoleName, TrainedRole]:
    """The roles that learn."""
    if isinstance(config, PpoConfig):
        return {"actor": config.actor, "critic": config.critic}
    return {"actor": config.actor}


def frozen_roles(config: JobConfig) -> dict[RoleName, FrozenRole]:
    """The models that only score. The first weights of an actor with an adapter are no further
    model: its own with the adapter switched off."""
    match config:
        case SftConfig():
            return {}
        case DpoConfig():
            wanted = needs_reference(config.algorithm.loss)
        case PpoConfig():
            wanted = config.algorithm.kl.place != "none"
        case _:
            assert_never(config)
    found: dict[RoleName, FrozenRole] = {}
    if wanted and config.reference is not None:
        found["reference"] = config.reference
    elif wanted and config.actor.adapter is None:
        found["reference"] = FrozenRole(model=config.actor.model)
    if isinstance(config, PpoConfig) and config.reward_model is not None:
        found["reward"] = config.reward_model.role
    return found


def role_models(config: JobConfig) -> dict[RoleName, ModelConfig]:
    """The model of every role."""
    trained = {name: role.model for name, role in trained_roles(config).items()}
    return trained | {name: role.model for name, role in frozen_roles(config).items()}


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest sequence that a forward may see."""
    new = config.rollout.sampling.max_new_tokens if isinstance(config, PpoConfig) else 0
    return config.data.max_tokens + new


def longest_written(config: JobConfig, *, sampling: bool) -> tuple[int, str]:
    """Tokens of the longest sequence of a role, and the keys that make it so long.

    sampling: the role answers held-out prompts too, as the actor does.
    """
    longest, written = config.data.max_tokens, f"data.max_tokens = {config.data.max_tokens}"
    if not isinstance(config, PpoConfig):
        return longest, written
    new = config.rollout.sampling.max_new_tokens
    written += f", rollout.sampling.max_new_tokens = {new}"
    if sampling and config.eval_sampling is not None:
        written += f", eval_sampling.max_new_tokens = {config.eval_sampling.max_new_tokens}"
        new = max(new, config.eval_sampling.max_new_tokens)
    return longest + new, written


def micro_batch(config: JobConfig, ranks: int) -> MicroBatch:
    """The largest pack of a rank: the token budget, or all that a rank has of an optimizer step
    where that is less."""
    longest = longest_sequence(config)
    most = -(-step_sequences(config) // ranks) * longest
    tokens = min(config.batch.micro_batch_tokens, max(most, longest))
    return MicroBatch(tokens, -(-tokens // longest), min(longest, tokens), tokens)


def step_sequences(config: JobConfig) -> int:
    """Of one optimizer step, over all ranks."""
    match config:
        case SftConfig():
            return config.batch.sequences
        case DpoConfig():
            return 2 * config.batch.pairs
        case PpoConfig():
            trajectories = config.batch.prompts * config.batch.responses
            return -(-trajectories // config.algorithm.mini_batches)
        case _:
            assert_never(config)


def bucket_bytes(config: JobConfig, shape: ModelShape) -> int:
    """Of the largest bucket of the actor's weights on its way to the engines: one tensor may be
    larger than a bucket is meant to be, and a tied head is sent beside the embedding."""
    if not isinstance(config, PpoConfig):
        return 0
    element = 2 if config.actor.model.dtype == "bfloat16" else 4
    tied = element * shape.embedding_parameters if shape.tied else 0
    largest = element * shape.largest_parameter
    whole = element * shape.parameters
    return min(max(config.rollout.sync.bucket_bytes, largest), whole) + tied


def phases(config: JobConfig) -> frozenset[Phase]:
    """Those that the job has. Evaluation by log-probs counts as scoring."""
    found: set[Phase] = {"load", "train_actor", "save"}
    if isinstance(config, PpoConfig):
        return frozenset(found | {"rollout", "score", "train_critic", "sync"})
    compared = isinstance(config, DpoConfig) and needs_reference(config.algorithm.loss)
    if compared or config.data.eval is not None:
        found.add("score")
    return frozenset(found)
