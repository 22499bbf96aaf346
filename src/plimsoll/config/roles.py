"""Which roles a job has: the models that learn, and those that only score."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import (
    ComparedJobConfig,
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PpoConfig,
    PrmConfig,
    RlJobConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.config.model import ModelConfig
from plimsoll.config.reference import needs_reference

RoleName = Literal["actor", "critic", "reference", "reward", "teacher"]
"""In the order in which they are loaded."""


def trained_roles(config: JobConfig) -> dict[RoleName, TrainedRole]:
    """The roles that learn."""
    if isinstance(config, PpoConfig):
        return {"actor": config.actor, "critic": config.critic}
    return {"actor": config.actor}


def given_frozen(config: JobConfig) -> dict[RoleName, FrozenRole]:
    """The models that only score, as far as the config has them."""
    found: dict[RoleName, FrozenRole] = {}
    if isinstance(config, ComparedJobConfig | RlJobConfig) and config.reference is not None:
        found["reference"] = config.reference
    if isinstance(config, RlJobConfig) and config.reward_model is not None:
        found["reward"] = config.reward_model.role
    if isinstance(config, DistillConfig):
        found["teacher"] = config.teacher
    return found


def frozen_roles(config: JobConfig) -> dict[RoleName, FrozenRole]:
    """The models that only score. The first weights of an actor with an adapter are no further
    model: its own with the adapter switched off; but for a reference that scores before there is an
    actor."""
    given = given_frozen(config)
    reference = given.pop("reference", None)
    if not is_compared(config):
        return given
    if reference is None and config.actor.adapter is not None and not is_precomputed(config):
        return given
    return {"reference": reference or FrozenRole(model=config.actor.model), **given}


def is_compared(config: JobConfig) -> bool:
    """Whether the actor is compared with a reference."""
    match config:
        case SftConfig() | DistillConfig() | RmConfig() | PrmConfig():
            return False
        case DpoConfig():
            return needs_reference(config.algorithm.loss)
        case KtoConfig():
            return True
        case PpoConfig():
            return config.algorithm.kl.place != "none"


def is_precomputed(config: JobConfig) -> bool:
    """Whether the reference scores everything before the actor is loaded."""
    return isinstance(config, ComparedJobConfig) and config.reference_logprobs.precompute


def key_of(role: str) -> str:
    """The config's key of a role."""
    return "reward_model.role" if role == "reward" else role


def role_models(config: JobConfig) -> dict[RoleName, ModelConfig]:
    """The model of every role."""
    trained = {name: role.model for name, role in trained_roles(config).items()}
    return trained | {name: role.model for name, role in frozen_roles(config).items()}


def role_ranks(config: JobConfig, role: RoleName) -> int:
    """Over how many ranks a role is divided."""
    own = config.cluster.critic_ranks
    return own if role == "critic" and own else config.cluster.ranks
