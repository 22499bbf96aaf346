"""From a role's config to everything that it holds on one rank: weights, states, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.engines import TRAINER_ENGINES, package_of
from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.model.price.form import (
    ActivationForm,
    TeacherHead,
    activation_form,
)
from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.spec.kernels import Capability
from plimsoll.spec.roles import HeadKind
from plimsoll.spec.run_spec import Phase
from plimsoll.timeline.items import Allocation, Moment
from plimsoll.timeline.lifetimes import TrainPhase, scoring_phase
from plimsoll.timeline.tensors import Tensors, state_items

_KEPT = 1024
"""Prices of roles: a search for what fits makes hundreds of plans, in which roles are alike."""


@dataclass(frozen=True)
class RoleWork:
    """A role's model, and what one rank does with it.

    work: its largest forward. ranks: that it is divided over. moments: all of the job's
    (`job_moments`). scaled: the sampling temperature is not 1. capability: the lowest of the run's
    cards; None where it is not known. first: of its ranks,
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
    first: bool = True
    scores: bool = True


@dataclass(frozen=True)
class TrainedTensors:
    """What a trainer engine holds on one rank for a role that learns.

    Attributes:
        tensors: weights, states, gradients, buffers, and copies on the way in and out.
        layers_left: layers whose activations are still kept when gradients are first reduced.
    """

    tensors: tuple[Tensors, ...]
    layers_left: int


@dataclass(frozen=True)
class SavedBytes:
    """The bytes of a trained parameter in a checkpoint."""

    masters: int
    moments: int
    average: int


@dataclass(frozen=True)
class TrainerPrice:
    """What a trainer engine holds on one rank.

    Attributes:
        trained: for a role that learns. Args: role, work, bytes of a bucket of weights on the way
            to engines (0 without engines).
        frozen: for a role that only scores.
        saved: what a checkpoint holds of a role that learns.
        division: how a role is divided over the ranks, in words, such as "stage 2".
        is_divided: whether anything of a role is divided.
        has_head: whether a role that only scores keeps its output head whole on the device.
            Args: role, ranks, device.
    """

    trained: Callable[[TrainedRole, RoleWork, int], TrainedTensors]
    frozen: Callable[[FrozenRole, RoleWork], tuple[Tensors, ...]]
    saved: Callable[[TrainedRole], SavedBytes]
    division: Callable[[TrainedRole | FrozenRole], str]
    is_divided: Callable[[TrainedRole | FrozenRole], bool]
    has_head: Callable[[FrozenRole, int, Device], bool]


def trainer_price(role: TrainedRole | FrozenRole) -> TrainerPrice:
    """Return the price of the engine that the role's settings name."""
    package = package_of(role.engine_name, TRAINER_ENGINES)
    return cast(TrainerPrice, import_module(f"{package}.price").PRICE)


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
    held = trainer_price(role).trained(role, own, sync_bucket)
    form = activation_form(
        *(role.model, role.adapter, shape, own.head, device, entropy, own.scaled),
        own.capability,
    )
    form = form if teacher is None else replace(form, head=teacher)
    return (
        *state_items(name, held.tensors, phase, own.moments),
        *activation_items(name, shape, work, form, phase),
        *backward_items(name, shape, work, form, Moment(phase, "backward"), shape.layers),
        *backward_items(name, shape, work, form, Moment(phase, "reduce"), held.layers_left),
        *_forwards(own, replace(form, trained=False)),
    )


def _forwards(own: RoleWork, form: ActivationForm) -> Iterator[Allocation]:
    """Without a backward: where the role scores, and where the actor's log-probs prove a sync."""
    phases: list[Phase] = ["score"] if own.scores else []
    phases += ["sync"] if own.name == "actor" else []
    for phase in phases:
        if Moment(phase, "forward") in own.moments:
            yield from activation_items(own.name, own.shape, own.work, form, phase)


@lru_cache(_KEPT)
def frozen_role(role: FrozenRole, own: RoleWork) -> tuple[Allocation, ...]:
    """What a role that only scores holds on one rank."""
    name, shape, device, moments = own.name, own.shape, own.device, own.moments
    tensors = trainer_price(role).frozen(role, own)
    form = activation_form(
        *(role.model, None, shape, own.head, device, False, own.scaled),
        own.capability,
    )
    form, phase = replace(form, trained=False), scoring_phase(name, moments)
    return (
        *state_items(name, tensors, None, moments),
        *activation_items(name, shape, own.work, form, phase),
    )
