"""From a role's config to everything that it holds on one rank: weights, states, activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.price.transfers import CHECKPOINT_FILE, leaving, loading
from plimsoll.engine.zero.price import layers_left, made_on_cpu, norm_copies, second_copy
from plimsoll.engine.zero.settings import deepspeed_settings, frozen_settings
from plimsoll.engine.zero.sizes import (
    Counts,
    ZeroSizes,
    frozen_counts,
    trained_counts,
    zero_sizes,
)
from plimsoll.engine.zero.states import weights, zero_states
from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.model.price.form import (
    ActivationForm,
    Capability,
    Fused,
    TeacherHead,
    activation_form,
)
from plimsoll.shapes.shape import MicroBatch, ModelShape, parameter_tensors
from plimsoll.spec.roles import HeadKind
from plimsoll.spec.run_spec import Phase
from plimsoll.timeline.items import Allocation, Moment, Where
from plimsoll.timeline.lifetimes import TrainPhase, scoring_phase
from plimsoll.timeline.tensors import Tensors, state_items

_WHOLE = ZeroSizes(stage=0, ranks=1, accumulate=4, bucket=0)
"""Of a frozen model that every rank has whole."""
_KEPT = 1024
"""Prices of roles: a search for what fits makes hundreds of plans, in which roles are alike."""


@dataclass(frozen=True)
class RoleWork:
    """A role's model, and what one rank does with it.

    work: its largest forward. ranks: that it is divided over. moments: all of the job's
    (`job_moments`). scaled: the sampling temperature is not 1. capability: the lowest of the run's
    cards; None where it is not known. fused: whose norms and gated MLPs serve. first: of its ranks,
    which collects the actor's weights when they leave. scores: whether it does a forward in the
    phase `score`.
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
    fused: Fused = "own"
    first: bool = True
    scores: bool = True


@lru_cache(_KEPT)
def trained_role(
    role: TrainedRole,
    own: RoleWork,
    phase: TrainPhase,
    *,
    entropy: bool = False,
    sync_bucket: int = 0,
    teacher: TeacherHead | None = None,
) -> tuple[Allocation, ...]:
    """What a trained role holds on one rank.

    phase: the one that trains it. entropy: the head computes it. sync_bucket: bytes of a bucket of
    the actor's weights on their way to engines; 0 without.
    """
    name, shape, work, device = own.name, own.shape, own.work, own.device
    settings: Any = deepspeed_settings(role, device, own.ranks)
    sizes = zero_sizes(settings, own.ranks)
    counts, adapted = trained_counts(role, shape, own.head, sizes), role.adapter is not None
    kept = [*zero_states(counts, sizes, device), *_beside(counts, sizes, device, role)]
    kept += norm_copies(counts, sizes, device)
    if device == "cpu":
        kept += made_on_cpu(counts, sizes, role.optimizer)
    kept += loading(shape, counts, device)
    if name == "actor":
        kept += leaving(counts, sizes, adapted, device, sync_bucket, own.first)
    form = activation_form(
        *(role.model, role.adapter, shape, own.head, device, entropy, own.scaled),
        *(own.capability, own.fused),
    )
    form = form if teacher is None else replace(form, head=teacher)
    left = layers_left(shape, counts.trained, sizes, adapted)
    return (
        *state_items(name, kept, phase, own.moments),
        *activation_items(name, shape, work, form, phase),
        *backward_items(name, shape, work, form, Moment(phase, "backward"), shape.layers),
        *backward_items(name, shape, work, form, Moment(phase, "reduce"), left),
        *_forwards(own, replace(form, trained=False)),
    )


def _forwards(own: RoleWork, form: ActivationForm) -> Iterator[Allocation]:
    """Without a backward: where the role scores, and where the actor's log-probs prove a sync."""
    phases: list[Phase] = ["score"] if own.scores else []
    phases += ["sync"] if own.name == "actor" else []
    for phase in phases:
        if Moment(phase, "forward") in own.moments:
            yield from activation_items(own.name, own.shape, own.work, form, phase)


def _beside(
    counts: Counts, sizes: ZeroSizes, device: Device, role: TrainedRole
) -> Iterator[Tensors]:
    """A moving average, in fp32, where the masters are and divided as they are; a second copy of
    the weights; and what is written."""
    ranks = sizes.ranks if sizes.stage > 0 else 1
    each = 4 if role.ema is not None else 0
    if each:
        where: Where = "device" if device == "cuda" and not sizes.offload else "host"
        name, of = "moving average of masters", "trained parameters"
        source, count = "engine/average.py", counts.trained
        yield Tensors("optimizer states", name, of, count, each, source, ranks, where, "built")
    if role.zero.hpz_partition_size > 1:
        yield second_copy(counts, role.zero.hpz_partition_size)
    states = round((4 + counts.moments + each) * counts.trained / ranks)
    yield Tensors(
        "buffers",
        "checkpoint file",
        "bytes: of a file that is gathered, and of the one before",
        min(2 * CHECKPOINT_FILE, states),
        1,
        "engine/checkpoint.py: write_rows",
        where="host",
        life="writing",
    )


@lru_cache(_KEPT)
def frozen_role(role: FrozenRole, own: RoleWork) -> tuple[Allocation, ...]:
    """What a role that only scores holds on one rank."""
    name, shape, device, moments = own.name, own.shape, own.device, own.moments
    sizes = _WHOLE
    if role.stage == 3:
        settings: Any = frozen_settings(role, device, own.ranks)
        sizes = zero_sizes(settings, own.ranks)
    counts = frozen_counts(role.model, shape, own.head, sizes)
    if sizes is _WHOLE:
        kept = [*_whole_model(role, counts, own)]
    else:
        kept = [*zero_states(counts, sizes, device)]
    kept += loading(shape, counts, device)
    form = activation_form(
        *(role.model, None, shape, own.head, device, False, own.scaled),
        *(own.capability, own.fused),
    )
    form, phase = replace(form, trained=False), scoring_phase(name, moments)
    return (
        *state_items(name, kept, None, moments),
        *activation_items(name, shape, own.work, form, phase),
    )


def _whole_model(role: FrozenRole, counts: Counts, own: RoleWork) -> Iterator[Tensors]:
    """A copy on every rank; offloaded, in host memory with one on the device while it scores."""
    made = weights(counts, _WHOLE)
    if own.device == "cpu":
        yield from (replace(one, where="host") for one in made)
        return
    if role.offload == "none":
        yield from made
        return
    yield from (replace(one, life="scoring") for one in made)
    for tensors in parameter_tensors(own.shape, own.head == "value"):
        yield Tensors(
            "weights",
            "weights in host memory",
            "parameters",
            tensors.parameters,
            counts.element,
            "engine/frozen.py: each parameter pinned by itself",
            where="host",
            pinned=tensors.elements,
        )
