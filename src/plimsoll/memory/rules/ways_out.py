"""What to write in a config so that some kind of item becomes smaller, or goes elsewhere.

Ways are joined by ", or ". One of several keys has "with" between them, and a way that begins with
a key and its value can be written as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import show
from plimsoll.config.rollout import RolloutConfig
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.items import Kind

Where = Literal["device", "host"]


def way_out(role: str, kind: Kind, where: Where, spec: RunSpec[Any]) -> str:
    """For a role's items of a kind, on the device or the host that is too small for them."""
    return ", or ".join(_ways(role, kind, where, spec))


def states_way_out(role: str, where: Where, spec: RunSpec[Any]) -> str:
    """For all that a trained role has."""
    return ", or ".join(_states(role, where, spec))


def written_reference(spec: RunSpec[Any]) -> Mapping[str, bool | int | float | str]:
    """The model of a reference that the config leaves to its default, the actor's: what must stand
    beside any other key of the reference."""
    reference = spec.roles.get("reference")
    if reference is None or reference.given:
        return {}
    own = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}  # of what learns
    fields = spec.actor.model.model_dump(exclude_defaults=True, exclude=own)
    return {f"reference.model.{key}": value for key, value in fields.items()}


def _ways(role: str, kind: Kind, where: Where, spec: RunSpec[Any]) -> Iterator[str]:
    match kind:
        case "frozen models":
            yield from _frozen_model(role, where, spec)
        case "rollout engines":
            assert spec.sampling is not None
            yield from _engine(where, spec.sampling.rollout)
        case "activations":
            yield from _activations(role, where, spec)
        case "processes":
            yield "fewer processes on a node: cluster.ranks, or more cluster.nodes"
        case "weights" if where == "device":
            yield from _weights(role, spec)
        case _:
            yield from _states(role, where, spec)


def _states(role: str, where: Where, spec: RunSpec[Any]) -> Iterator[str]:
    """Gradients and optimizer states."""
    trained = _trained(role, spec)
    zero, offloaded = f"{role}.zero", trained.zero.optimizer_offload == "cpu"
    if where == "device":
        if not offloaded:
            stage = f" with {zero}.stage: 1" if trained.zero.stage == 0 else ""
            yield f"{zero}.optimizer_offload: cpu{stage}"
        if trained.zero.stage < 3 and (offloaded or spec.cluster.ranks > 1):
            yield f"{zero}.stage: 3"
    elif "critic" in spec.trained and _could_have_own_ranks(spec):
        yield "cluster.critic_ranks, so that actor and critic are on nodes of their own"
    if trained.adapter is None:
        yield f"{role}.adapter"
    yield from _larger(spec, where, divided=trained.zero.stage > 0)


def _could_have_own_ranks(spec: RunSpec[Any]) -> bool:
    return spec.cluster.critic_ranks is None and spec.cluster.where == "ray"


def _weights(role: str, spec: RunSpec[Any]) -> Iterator[str]:
    """On a card; those of a frozen base may be in 4 bits."""
    trained = _trained(role, spec)
    if trained.adapter is None:
        yield f"{role}.adapter with {role}.model.quantization: nf4"
    elif trained.model.quantization == "none":
        yield f"{role}.model.quantization: nf4"
    if trained.zero.stage < 3 and spec.cluster.ranks > 1:
        yield f"{role}.zero.stage: 3"
    if trained.zero.parameter_offload == "none":
        stage = f" with {role}.zero.stage: 3" if trained.zero.stage < 3 else ""
        yield f"{role}.zero.parameter_offload: cpu{stage}"
    yield from _larger(spec, "device", divided=trained.zero.stage == 3)


def _larger(spec: RunSpec[Any], where: Where, *, divided: bool) -> Iterator[str]:
    """divided: further ranks take their part; but a node's memory is that of all its ranks."""
    if divided:
        more = "cluster.ranks (and cluster.nodes for their cards)"
        if where == "host":
            more = "cluster.nodes (and cluster.ranks on them)"
        yield f"more {more}{', with cluster.where: ray' * (spec.cluster.where == 'local')}"


def _trained(role: str, spec: RunSpec[Any]) -> TrainedRole:
    """Its settings; of a role that only scores, the actor's."""
    return spec.trained.get(cast(RoleName, role), spec.actor)


def _frozen_model(role: str, where: Where, spec: RunSpec[Any]) -> Iterator[str]:
    key, frozen = spec.roles[cast(RoleName, role)].key, spec.frozen[cast(RoleName, role)]
    written = [f"{name}: {show(value)}" for name, value in written_reference(spec).items()]
    beside = "".join(f" with {setting}" for setting in written if role == "reference")
    if where == "device" and frozen.offload == "none" and frozen.model.quantization == "none":
        yield f"{key}.offload: cpu{beside}"
    elif where == "host" and frozen.offload == "cpu":
        yield f"{key}.offload: none"
    if spec.cluster.ranks > 1 and frozen.stage == 0:
        yield f"{key}.stage: 3{beside}"
    if spec.may_precompute and not spec.precomputes:
        yield "reference_logprobs.precompute: true"
    yield from _larger(spec, where, divided=frozen.stage == 3 or spec.actor.zero.stage > 0)


def _engine(where: Where, rollout: RolloutConfig) -> Iterator[str]:
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


def _activations(role: str, where: Where, spec: RunSpec[Any]) -> Iterator[str]:
    model = _trained(role, spec).model
    learns, again = role in ("actor", "critic"), model.gradient_checkpointing
    if learns and again is not True:
        yield f"{role}.model.gradient_checkpointing: true"
    if learns and again and model.checkpoint_every > 1:
        yield f"{role}.model.checkpoint_every: 1"
    yield _smaller_micro_batch(spec)
    if learns and again and model.activation_offload == "none" and where == "device":
        yield f"{role}.model.activation_offload: cpu"


def _smaller_micro_batch(spec: RunSpec[Any]) -> str:
    """It holds the longest sequence (or pair) at least."""
    work, tokens = spec.workload, spec.workload.budget
    if tokens > work.longest * work.together:
        return f"a smaller batch.micro_batch_tokens (now {tokens:,})"
    _, lengths = spec.longest_of("reference")
    return f"shorter sequences ({lengths}), and batch.micro_batch_tokens with them"
