"""What to write in a config so that some kind of item becomes smaller, or goes elsewhere.

Ways are joined by ", or ". One of several keys has "with" between them, and a way that begins with
a key and its value can be written as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.jobs import ComparedJobConfig, JobConfig, PpoConfig, RlJobConfig
from plimsoll.config.problems import show
from plimsoll.config.roles import given_frozen, key_of, trained_roles
from plimsoll.memory.contents.kinds import Kind
from plimsoll.memory.price.work import longest_sequence, longest_written, sequences_together

Where = Literal["device", "host"]


def way_out(role: str, kind: Kind, where: Where, config: JobConfig) -> str:
    """For a role's items of a kind, on the device or the host that is too small for them."""
    return ", or ".join(_ways(role, kind, where, config))


def states_way_out(role: str, where: Where, config: JobConfig) -> str:
    """For all that a trained role has."""
    return ", or ".join(_states(role, where, config))


def written_reference(config: JobConfig) -> Mapping[str, bool | int | float | str]:
    """The model of a reference that the config leaves to its default, the actor's: what must stand
    beside any other key of the reference."""
    if not isinstance(config, ComparedJobConfig | RlJobConfig) or config.reference is not None:
        return {}
    own = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}  # of what learns
    fields = config.actor.model.model_dump(exclude_defaults=True, exclude=own)
    return {f"reference.model.{key}": value for key, value in fields.items()}


def _ways(role: str, kind: Kind, where: Where, config: JobConfig) -> Iterator[str]:
    match kind:
        case "frozen models":
            yield from _frozen_model(role, where, config)
        case "rollout engines":
            assert isinstance(config, RlJobConfig)
            yield from _engine(where, config)
        case "activations":
            yield from _activations(role, where, config)
        case "processes":
            yield "fewer processes on a node: cluster.ranks, or more cluster.nodes"
        case "weights" if where == "device":
            yield from _weights(role, config)
        case _:
            yield from _states(role, where, config)


def _states(role: str, where: Where, config: JobConfig) -> Iterator[str]:
    """Gradients and optimizer states."""
    trained = _trained(role, config)
    zero, offloaded = f"{role}.zero", trained.zero.optimizer_offload == "cpu"
    if where == "device":
        if not offloaded:
            stage = f" with {zero}.stage: 1" if trained.zero.stage == 0 else ""
            yield f"{zero}.optimizer_offload: cpu{stage}"
        if trained.zero.stage < 3 and (offloaded or config.cluster.ranks > 1):
            yield f"{zero}.stage: 3"
    elif "critic" in trained_roles(config) and _could_have_own_ranks(config):
        yield "cluster.critic_ranks, so that actor and critic are on nodes of their own"
    if trained.adapter is None:
        yield f"{role}.adapter"
    yield from _larger(config, where, divided=trained.zero.stage > 0)


def _could_have_own_ranks(config: JobConfig) -> bool:
    return config.cluster.critic_ranks is None and config.cluster.where == "ray"


def _weights(role: str, config: JobConfig) -> Iterator[str]:
    """On a card; those of a frozen base may be in 4 bits."""
    trained = _trained(role, config)
    if trained.adapter is None:
        yield f"{role}.adapter with {role}.model.quantization: nf4"
    elif trained.model.quantization == "none":
        yield f"{role}.model.quantization: nf4"
    if trained.zero.stage < 3 and config.cluster.ranks > 1:
        yield f"{role}.zero.stage: 3"
    if trained.zero.parameter_offload == "none":
        stage = f" with {role}.zero.stage: 3" if trained.zero.stage < 3 else ""
        yield f"{role}.zero.parameter_offload: cpu{stage}"
    yield from _larger(config, "device", divided=trained.zero.stage == 3)


def _larger(config: JobConfig, where: Where, *, divided: bool) -> Iterator[str]:
    """divided: further ranks take their part; but a node's memory is that of all its ranks."""
    if divided:
        more = "cluster.ranks (and cluster.nodes for their cards)"
        if where == "host":
            more = "cluster.nodes (and cluster.ranks on them)"
        yield f"more {more}{', with cluster.where: ray' * (config.cluster.where == 'local')}"


def _trained(role: str, config: JobConfig) -> TrainedRole:
    return config.critic if role == "critic" and isinstance(config, PpoConfig) else config.actor


def _frozen_model(role: str, where: Where, config: JobConfig) -> Iterator[str]:
    key = key_of(role)
    frozen = _frozen(role, config)
    written = [f"{name}: {show(value)}" for name, value in written_reference(config).items()]
    beside = "".join(f" with {setting}" for setting in written if role == "reference")
    if where == "device" and frozen.offload == "none" and frozen.model.quantization == "none":
        yield f"{key}.offload: cpu{beside}"
    elif where == "host" and frozen.offload == "cpu":
        yield f"{key}.offload: none"
    if config.cluster.ranks > 1 and frozen.stage == 0:
        yield f"{key}.stage: 3{beside}"
    if isinstance(config, ComparedJobConfig) and not config.reference_logprobs.precompute:
        yield "reference_logprobs.precompute: true"
    yield from _larger(config, where, divided=frozen.stage == 3 or config.actor.zero.stage > 0)


def _frozen(role: str, config: JobConfig) -> FrozenRole:
    given = {str(name): frozen for name, frozen in given_frozen(config).items()}
    return given.get(role) or FrozenRole(model=config.actor.model)


def _engine(where: Where, config: RlJobConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "transformers":
        yield f"a smaller rollout.max_sequences (now {rollout.max_sequences})"
    elif where == "device":
        yield f"a lower rollout.memory_share (now {rollout.memory_share:g})"
        if rollout.placement == "shared" and rollout.sleep_level == 0:
            yield "rollout.sleep_level: 1"
    elif rollout.sleep_level == 1:
        yield "rollout.sleep_level: 2"
    else:
        fewer = "fewer rollout.engines on a node, " if rollout.engines > 1 else ""
        yield (
            f"{fewer}on CPU a smaller rollout.cpu_kv_cache_gib (now "
            f"{rollout.cpu_kv_cache_gib:g}), or a smaller rollout.sync.bucket_bytes"
        )


def _activations(role: str, where: Where, config: JobConfig) -> Iterator[str]:
    model = _trained(role, config).model
    learns, again = role in ("actor", "critic"), model.gradient_checkpointing
    if learns and again is not True:
        yield f"{role}.model.gradient_checkpointing: true"
    if learns and again and model.checkpoint_every > 1:
        yield f"{role}.model.checkpoint_every: 1"
    yield _smaller_micro_batch(config)
    if learns and again and model.activation_offload == "none" and where == "device":
        yield f"{role}.model.activation_offload: cpu"


def _smaller_micro_batch(config: JobConfig) -> str:
    """It holds the longest sequence (or pair) at least."""
    tokens = config.batch.micro_batch_tokens
    if tokens > longest_sequence(config) * sequences_together(config):
        return f"a smaller batch.micro_batch_tokens (now {tokens:,})"
    _, lengths = longest_written(config, sampling=False)
    return f"shorter sequences ({lengths}), and batch.micro_batch_tokens with them"
