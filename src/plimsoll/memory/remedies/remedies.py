"""The catalogue of remedies: what makes some kind of item smaller, or puts it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.memory.remedies import levers
from plimsoll.memory.remedies.changes import Move, Remedy, value_at
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.sampler import keeps_weights
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import Phase, RunSpec
from plimsoll.timeline.items import Kind, Where


def remedies_for(
    role: str, kind: Kind, where: Where, phase: Phase, spec: RunSpec[Any]
) -> Iterator[Remedy]:
    """For a role's items of a kind, on the device or the host that is too small for them in a
    phase."""
    match kind:
        case "frozen models":
            yield from _frozen_model(role, where, spec)
        case "rollout engines":
            assert spec.engines is not None
            yield from _engine(where, spec.engines)
        case "activations":
            yield from _activations(role, where, phase, spec)
        case "processes":
            yield Remedy(words="fewer processes on a node: cluster.ranks, or more cluster.nodes")
        case "weights" if where == "device":
            yield from _weights(role, spec)
        case _:
            yield from remedies_for_states(role, where, spec)


def remedies_for_states(role: str, where: Where, spec: RunSpec[Any]) -> Iterator[Remedy]:
    """For gradients and optimizer states, or all that a trained role has."""
    trained = _trained(role, spec)
    offloaded = trained.settings_of(ZeroConfig).optimizer_offload == "cpu"
    if where == "device":
        if not offloaded:
            yield _written(role, trained, levers.optimizer_on_host(trained))
        if trained.settings_of(ZeroConfig).stage < 3 and (offloaded or spec.cluster.ranks > 1):
            yield _written(role, trained, levers.DIVIDED)
    elif "critic" in spec.trained and _could_have_own_ranks(spec):
        so_that = "so that actor and critic are on nodes of their own"
        yield Remedy(words=f"cluster.critic_ranks, {so_that}")
    if trained.adapter is None:
        yield _written(role, trained, levers.with_adapter(trained))
    yield from _larger(spec, where, divided=trained.settings_of(ZeroConfig).stage > 0)


def _trained(role: str, spec: RunSpec[Any]) -> TrainedRole:
    """Its settings; of a role that only scores, the actor's."""
    return spec.trained.get(role, spec.actor)


def _written(role: str, trained: TrainedRole, move: Move) -> Remedy:
    """Keys of a role's section, but for those that have their values already."""
    made = {key: value for key, value in move.items() if value_at(trained, key) != value}
    return Remedy({f"{role}.{key}": value for key, value in made.items()})


def _could_have_own_ranks(spec: RunSpec[Any]) -> bool:
    return spec.cluster.critic_ranks is None and spec.cluster.where == "ray"


def _weights(role: str, spec: RunSpec[Any]) -> Iterator[Remedy]:
    """On a card; those of a frozen base may be in 4 bits."""
    trained = _trained(role, spec)
    if trained.model.quantization == "none":
        yield _written(role, trained, levers.quantised(trained))
    if trained.settings_of(ZeroConfig).stage < 3 and spec.cluster.ranks > 1:
        yield _written(role, trained, levers.DIVIDED)
    if trained.settings_of(ZeroConfig).parameter_offload == "none":
        yield _written(role, trained, levers.WEIGHTS_ON_HOST)
    yield from _larger(spec, "device", divided=trained.settings_of(ZeroConfig).stage == 3)


def _larger(spec: RunSpec[Any], where: Where, *, divided: bool) -> Iterator[Remedy]:
    """divided: further ranks take their part; but a node's memory is that of all its ranks."""
    if divided:
        more = "cluster.ranks (and cluster.nodes for their cards)"
        if where == "host":
            more = "cluster.nodes (and cluster.ranks on them)"
        on_ray = ", with cluster.where: ray" * (spec.cluster.where == "local")
        yield Remedy(words=f"more {more}{on_ray}")


def _frozen_model(role: RoleName, where: Where, spec: RunSpec[Any]) -> Iterator[Remedy]:
    frozen = spec.frozen[role]
    if (
        where == "device"
        and frozen.settings_of(FrozenZeroConfig).offload == "none"
        and frozen.model.quantization == "none"
    ):
        yield Remedy(levers.of_frozen(spec, role, levers.MODEL_ON_HOST))
    elif where == "host" and frozen.settings_of(FrozenZeroConfig).offload == "cpu":
        yield Remedy(levers.of_frozen(spec, role, levers.MODEL_OFF_HOST))
    if spec.cluster.ranks > 1 and frozen.settings_of(FrozenZeroConfig).stage == 0:
        yield Remedy(levers.of_frozen(spec, role, levers.MODEL_DIVIDED))
    if spec.may_precompute and not spec.precomputes:
        yield Remedy(levers.PRECOMPUTED)
    yield from _larger(
        spec,
        where,
        divided=frozen.settings_of(FrozenZeroConfig).stage == 3
        or spec.actor.settings_of(ZeroConfig).stage > 0,
    )


def _engine(where: Where, rollout: RolloutConfig) -> Iterator[Remedy]:
    if rollout.engine_name == "transformers":
        yield Remedy(
            words=f"a smaller rollout.transformers.max_sequences (now {rollout.max_sequences})"
        )
    elif where == "device":
        yield Remedy(
            words=f"a lower rollout.vllm.memory_share (now {vllm_of(rollout).memory_share:g})"
        )
        if rollout.placement == "shared" and vllm_of(rollout).sleep_level == 0:
            yield Remedy(levers.sleep(rollout))
    elif vllm_of(rollout).sleep_level == 1 and not keeps_weights(vllm_of(rollout)):
        yield Remedy(levers.sleep(rollout))
    else:
        fewer = "fewer rollout.engines on a node, " if rollout.engines > 1 else ""
        cache = f"rollout.vllm.cpu_kv_cache_gib (now {vllm_of(rollout).cpu_kv_cache_gib:g})"
        yield Remedy(words=f"{fewer}on CPU a smaller {cache}")
        yield Remedy(words="a smaller rollout.sync.bucket_bytes")


def _activations(role: str, where: Where, phase: Phase, spec: RunSpec[Any]) -> Iterator[Remedy]:
    """What is kept for a backward pass can be less only where there is one."""
    trained = _trained(role, spec)
    model, learns = trained.model, phase in ("train_actor", "train_critic")
    again = model.gradient_checkpointing
    if learns and again is not True:
        yield _written(role, trained, levers.ALL_RECOMPUTED)
    if learns and again and model.checkpoint_every > 1:
        yield _written(role, trained, levers.EACH_LAYER_CHECKPOINTED)
    yield from _smaller_micro_batches(spec)
    if learns and again and model.activation_offload == "none" and where == "device":
        yield _written(role, trained, levers.INPUTS_ON_HOST)


def _smaller_micro_batches(spec: RunSpec[Any]) -> Iterator[Remedy]:
    yield from (Remedy(move) for move in levers.smaller_micro_batches(spec))
    if spec.workload.budget <= spec.workload.least_budget:
        _, lengths = spec.longest_of("reference")
        words = f"shorter sequences ({lengths}), and batch.micro_batch_tokens with them"
        yield Remedy(words=words)
