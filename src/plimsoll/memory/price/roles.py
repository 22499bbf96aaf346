"""From a role's config to everything that it holds on one rank: weights, states, activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from plimsoll.config.adapter import AdapterConfig
from plimsoll.config.deepspeed import Device, deepspeed_settings, frozen_settings
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.memory.items import Held, Moment
from plimsoll.memory.price.activation_form import ActivationForm, TaughtHead
from plimsoll.memory.price.activations import activation_items, backward_items
from plimsoll.memory.price.computing import activation_form
from plimsoll.memory.price.division import Counts, ZeroSizes
from plimsoll.memory.price.kept_beside import kept_beside
from plimsoll.memory.price.lifetimes import TrainPhase, scoring_phase
from plimsoll.memory.price.norms import norm_copies
from plimsoll.memory.price.on_cpu import made_on_cpu
from plimsoll.memory.price.reduction import layers_left
from plimsoll.memory.price.states import Kept, StateForm, state_items
from plimsoll.memory.price.transfers import leaving, loading
from plimsoll.memory.price.varlen import Capability
from plimsoll.memory.price.zero_states import weights, zero_states
from plimsoll.shapes.shape import (
    MicroBatch,
    ModelShape,
    parameter_tensors,
    small_parameters,
)
from plimsoll.spec.roles import HeadKind
from plimsoll.spec.run_spec import Phase

_NF4 = 4 / 64  # bytes of fp32 scales a parameter, in blocks of 64
_NF4_DOUBLE = 1 / 64 + 4 / (64 * 256)  # 8-bit scales, and fp32 ones of blocks of 256 of them
EMBEDDINGS = "embed_tokens"
"""The input embedding, as an adapter's target; it is no linear layer."""
_KEPT = 1024
"""Prices of roles: a search for what fits makes hundreds of plans, in which roles are alike."""
_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # both; 8 bits: fp32 scales of 256


@dataclass(frozen=True)
class RoleWork:
    """A role's model, and what one rank does with it.

    work: its largest forward. ranks: that it is divided over. moments: all of the job's
    (`job_moments`). scaled: the sampling temperature is not 1. capability: the lowest of the run's
    cards; None where it is not known.
    """

    name: str
    shape: ModelShape
    head: HeadKind
    work: MicroBatch
    ranks: int
    device: Device
    moments: frozenset[Moment]
    scaled: bool = False
    capability: Capability | None = None


@lru_cache(_KEPT)
def trained_role(
    role: TrainedRole,
    own: RoleWork,
    phase: TrainPhase,
    *,
    entropy: bool = False,
    sync_bucket: int = 0,
    teacher: TaughtHead | None = None,
) -> tuple[Held, ...]:
    """What a trained role holds on one rank (rank 0, which gathers what is saved).

    phase: the one that trains it. entropy: the head computes it. sync_bucket: bytes of a bucket of
    weights on their way to engines; 0 if it has none.
    """
    name, shape, head, work, device = own.name, own.shape, own.head, own.work, own.device
    settings: Any = deepspeed_settings(role, device, own.ranks)
    sizes = zero_sizes(settings, own.ranks)
    counts = trained_counts(role, shape, head, sizes)
    kept = zero_states(counts, sizes, device)
    kept += tuple(kept_beside(counts, sizes, device, role))
    kept += tuple(norm_copies(counts, sizes, device))
    if device == "cpu":
        kept += tuple(made_on_cpu(counts, sizes, role.optimizer))
    kept += tuple(loading(shape, counts, device))
    kept += tuple(leaving(counts, sizes, role.adapter is not None, device, sync_bucket))
    form = activation_form(
        role.model, role.adapter, shape, head, device, entropy, own.scaled, own.capability
    )
    form = form if teacher is None else replace(form, head=teacher)
    left = layers_left(shape, counts.trained, sizes, role.adapter is not None)
    return (
        *state_items(name, StateForm(kept, phase, own.moments)),
        *activation_items(name, shape, work, form, phase),
        *backward_items(name, shape, work, form, Moment(phase, "backward"), shape.layers),
        *backward_items(name, shape, work, form, Moment(phase, "reduce"), left),
        *_forwards(own, replace(form, trained=False)),
    )


def _forwards(own: RoleWork, form: ActivationForm) -> Iterator[Held]:
    """Without a backward: where the role scores, and where the actor's log-probs prove a sync."""
    phases: tuple[Phase, ...] = ("score", "sync") if own.name == "actor" else ("score",)
    for phase in phases:
        if Moment(phase, "forward") in own.moments:
            yield from activation_items(own.name, own.shape, own.work, form, phase)


def frozen_role(role: FrozenRole, own: RoleWork) -> tuple[Held, ...]:
    """What a role that only scores holds on one rank."""
    name, shape, device, moments = own.name, own.shape, own.device, own.moments
    counts = _frozen_counts(role.model, shape, own.head)
    if role.stage == 3:
        settings: Any = frozen_settings(role, device, own.ranks)
        sizes = zero_sizes(settings, own.ranks)
        counts = replace(counts, small=_small(role.model, shape, own.head, sizes))
        kept = zero_states(counts, sizes, device)
    else:
        kept = tuple(_whole_model(role, counts, own))
    kept += tuple(loading(shape, counts, device))
    form = activation_form(
        role.model, None, shape, own.head, device, False, own.scaled, own.capability
    )
    form, phase = replace(form, trained=False), scoring_phase(name, moments)
    return (
        *state_items(name, StateForm(kept, None, moments)),
        *activation_items(name, shape, own.work, form, phase),
    )


def zero_sizes(settings: dict[str, Any], ranks: int) -> ZeroSizes:
    """What memory depends on of DeepSpeed's settings."""
    zero = settings["zero_optimization"]
    optimizer, parameter = zero.get("offload_optimizer"), zero.get("offload_param")
    narrow = settings.get("data_types", {}).get("grad_accum_dtype") == "bf16"
    return ZeroSizes(
        stage=zero["stage"],
        ranks=ranks,
        accumulate=2 if narrow else 4,
        bucket=zero["reduce_bucket_size"],
        prefetch=zero.get("stage3_prefetch_bucket_size", 0),
        live=zero.get("stage3_max_live_parameters", 0),
        persistence=zero.get("stage3_param_persistence_threshold", 0),
        sub_group=zero.get("sub_group_size", 0),
        offload=optimizer is not None,
        offload_weights=parameter is not None,
        pinned=any(o is not None and o["pin_memory"] for o in (optimizer, parameter)),
        master=2 if settings["bf16"].get("bf16_master_weights_and_grads") else 4,
    )


def moment_bytes(role: TrainedRole) -> float:
    """Of both Adam moments of a trained parameter."""
    narrow = role.optimizer.kind == "adamw" and role.zero.state_dtype == "bfloat16"
    return 4.0 if narrow else _MOMENTS[role.optimizer.kind]


def trained_counts(
    role: TrainedRole, shape: ModelShape, head: HeadKind, sizes: ZeroSizes
) -> Counts:
    """Elements with and without gradients, in 16 and in 4 bits."""
    base = _frozen_counts(role.model, shape, head)
    small = _small(role.model, shape, head, sizes) if sizes.stage == 3 else 0
    moments = moment_bytes(role)
    if role.adapter is None:
        tensors = parameter_tensors(shape, head == "value")
        return replace(
            base,
            trained=base.frozen,
            frozen=0,
            largest=shape.largest_parameter,
            oversized=sum(t.parameters for t in tensors if t.elements > sizes.bucket),
            moments=moments,
            small=small,
        )
    value = shape.hidden if head == "value" else 0
    pairs = adapter_tensors(shape, role.adapter)
    return replace(
        base,
        trained=sum(count * elements for count, elements in pairs) + value,
        frozen=base.frozen - value,
        largest=max((elements for _, elements in pairs), default=0),  # a wrong target wraps nothing
        moments=moments,
        small=small + sum(c * e for c, e in pairs if e <= sizes.persistence),
    )


def adapter_tensors(shape: ModelShape, adapter: AdapterConfig) -> list[tuple[int, int]]:
    """(how many, elements of each) of an adapter's matrices and DoRA's magnitudes."""
    tensors = []
    for linear in shape.linears:
        if linear.stacked == 1 and ({linear.name, "all-linear"} & {*adapter.targets}):
            sides = [linear.inputs, linear.outputs]
            tensors += [(linear.count, adapter.rank * side) for side in sides]
            tensors += [(linear.count, linear.outputs)] if adapter.dora else []
    if EMBEDDINGS in adapter.targets:
        tensors += [(1, adapter.rank * side) for side in (shape.vocabulary, shape.hidden)]
        tensors += [(1, shape.hidden)] if adapter.dora else []
    return tensors


def _frozen_counts(model: ModelConfig, shape: ModelShape, head: HeadKind) -> Counts:
    whole = shape.value_parameters if head == "value" else shape.parameters
    quantized = 0
    if model.quantization == "nf4":
        quantized = sum(x.count * x.inputs * x.outputs for x in shape.linears if x.stacked == 1)
    return Counts(
        trained=0,
        frozen=whole - quantized,
        largest=0,
        element=model.element,
        quantized=quantized,
        scales=_NF4_DOUBLE if model.double_quantization else _NF4,
    )


def _codes(model: ModelConfig) -> int:
    """4-bit codes that are stored as one element of the model's dtype; 1 where there are none."""
    return 2 * model.element if model.quantization == "nf4" else 1


def _small(model: ModelConfig, shape: ModelShape, head: HeadKind, sizes: ZeroSizes) -> int:
    """Elements that stage 3 keeps whole."""
    return small_parameters(shape, sizes.persistence, _codes(model), head == "value")


def _whole_model(role: FrozenRole, counts: Counts, own: RoleWork) -> Iterator[Kept]:
    """A copy on every rank; offloaded, in host memory with one on the device while it scores."""
    one_rank = ZeroSizes(stage=0, ranks=1, accumulate=4, bucket=0)
    made = list(weights(counts, one_rank))
    if own.device == "cpu":
        yield from (replace(one, where="host") for one in made)
        return
    if role.offload == "none":
        yield from made
        return
    yield from (replace(one, life="scoring") for one in made)
    for tensors in parameter_tensors(own.shape, own.head == "value"):
        yield Kept(
            "weights in host memory",
            "parameters",
            tensors.parameters,
            counts.element,
            "engine/frozen.py: each parameter pinned by itself",
            where="host",
            pinned=tensors.elements,
        )
