"""What to write in a config so that some kind of item becomes smaller, or goes elsewhere."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import ComparedJobConfig, DistillConfig, JobConfig, PpoConfig
from plimsoll.memory.plan.kinds import Kind

Where = Literal["device", "host"]


def way_out(role: str, kind: Kind, where: Where, config: JobConfig) -> str:
    """For a role's items of a kind, on the device or the host that is too small for them."""
    match kind:
        case "frozen models":
            return _frozen_model(role, where, config)
        case "rollout engines":
            assert isinstance(config, PpoConfig)
            return _engine(where, config)
        case "activations":
            return _activations(role, config)
        case "processes":
            return "fewer processes on a node: cluster.ranks, or more cluster.nodes"
        case _:
            return states_way_out(role, where, config)


def states_way_out(role: str, where: Where, config: JobConfig) -> str:
    """For weights, gradients and optimizer states of a trained role."""
    trained = _trained(role, config)
    ways = []
    if where == "device":
        if trained.zero.optimizer_offload == "none":
            ways.append(f"{role}.zero.optimizer_offload: cpu")
        if trained.zero.stage < 3 and config.cluster.ranks > 1:
            ways.append(f"{role}.zero.stage: 3")
    elif isinstance(config, PpoConfig) and config.cluster.critic_ranks is None:
        ways.append("cluster.critic_ranks, so that actor and critic are on nodes of their own")
    if trained.adapter is None:
        ways.append(f"{role}.adapter")
    return ", or ".join([*ways, _larger(config)])


def _larger(config: JobConfig) -> str:
    more = "more cluster.nodes and cluster.ranks"
    return more if config.cluster.where == "ray" else f"cluster.where: ray with {more}"


def _trained(role: str, config: JobConfig) -> TrainedRole:
    return config.critic if role == "critic" and isinstance(config, PpoConfig) else config.actor


def _frozen_model(role: str, where: Where, config: JobConfig) -> str:
    key = "reward_model.role" if role == "reward" else role
    frozen = _frozen(role, config)
    ways = []
    if where == "device" and (frozen is None or frozen.offload == "none"):
        ways.append(f"{key}.offload: cpu")
    elif where == "host" and frozen is not None and frozen.offload == "cpu":
        ways.append(f"{key}.offload: none")
    if config.cluster.ranks > 1 and (frozen is None or frozen.stage == 0):
        ways.append(f"{key}.stage: 3")
    if isinstance(config, ComparedJobConfig) and not config.reference_logprobs.precompute:
        ways.append("reference_logprobs.precompute: true")
    return ", or ".join([*ways, _larger(config)])


def _frozen(role: str, config: JobConfig) -> FrozenRole | None:
    if role == "reward" and isinstance(config, PpoConfig):
        return config.reward_model.role if config.reward_model else None
    if isinstance(config, DistillConfig):
        return config.teacher
    return config.reference if isinstance(config, ComparedJobConfig | PpoConfig) else None


def _engine(where: Where, config: PpoConfig) -> str:
    rollout = config.rollout
    if rollout.engine == "transformers":
        return f"a smaller rollout.max_sequences (now {rollout.max_sequences})"
    if where == "host":
        if rollout.sleep_level == 1:
            return "rollout.sleep_level: 2"
        return (
            f"fewer rollout.engines on a node, on CPU a smaller rollout.cpu_kv_cache_gib (now "
            f"{rollout.cpu_kv_cache_gib:g}), or a smaller rollout.sync.bucket_bytes"
        )
    lower = f"a lower rollout.memory_share (now {rollout.memory_share:g})"
    awake = rollout.placement == "shared" and rollout.sleep_level == 0
    return f"{lower}, or rollout.sleep_level: 1" if awake else lower


def _activations(role: str, config: JobConfig) -> str:
    smaller = f"a smaller batch.micro_batch_tokens (now {config.batch.micro_batch_tokens:,})"
    if role not in ("actor", "critic"):
        return smaller
    model = _trained(role, config).model
    if model.gradient_checkpointing is not True:
        return f"{role}.model.gradient_checkpointing: true, or {smaller}"
    if model.checkpoint_every > 1:
        return f"{role}.model.checkpoint_every: 1, or {smaller}"
    return smaller
