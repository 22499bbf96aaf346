"""From a role's config to everything that it holds on one rank: weights, states, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
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
"""How many prices are cached: a search for what fits makes hundreds of plans with like roles."""


@dataclass(frozen=True)
class RoleWork:
    """A role's model, and what one rank does with it.

    Attributes:
        work: The role's largest forward.
        ranks: The number of ranks that the role is divided over.
        moments: All moments of the job (`job_moments`).
        scaled: Whether the sampling temperature is not 1.
        capability: The lowest compute capability of the run's cards; None if unknown.
        first: Whether this is the first of the role's ranks, which collects the actor's weights
            when they leave.
        scores: Whether the role does a forward in the phase `score`.
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
        tensors: Weights, states, gradients, buffers, and copies on the way in and out.
        layers_left: Layers whose activations are still kept when gradients are first reduced.
    """

    tensors: tuple[Tensors, ...]
    layers_left: int


@dataclass(frozen=True)
class SavedBytes:
    """The bytes of a trained parameter in a checkpoint, by what they hold."""

    masters: int
    moments: int
    average: int


@dataclass(frozen=True)
class TrainerPrice:
    """What a trainer engine holds on one rank.

    Attributes:
        trained: Returns the tensors of a role that learns. Args: role, work, bytes of a bucket of
            weights on the way to engines (0 without engines).
        frozen: Returns the tensors of a role that only scores. Args: role, work.
        saved: Returns what a checkpoint holds of a role that learns.
        division: Describes how a role is divided over the ranks, such as "stage 2".
        is_divided: Returns whether anything of a role is divided.
        has_head: Returns whether a role that only scores keeps its output head whole on the device.
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
    return cast(TrainerPrice, role.engine_value("price"))


@lru_cache(_KEPT)
def trained_role(
    role: TrainedRole,
    role_work: RoleWork,
    phase: TrainPhase,
    *,
    entropy: bool = False,
    sync_bucket: int = 0,
    teacher: TeacherHead | None = None,
) -> tuple[Allocation, ...]:
    """Return what a trained role holds on one rank.

    Args:
        role: The role's config.
        role_work: The role's model, and what the rank does with it.
        phase: The phase that trains it.
        entropy: Whether the head computes the entropy.
        sync_bucket: Bytes of a bucket of the actor's weights on their way to engines; 0 without.
        teacher: The teacher's head, for a student.
    """
    name, shape, work, device = role_work.name, role_work.shape, role_work.work, role_work.device
    trained = trainer_price(role).trained(role, role_work, sync_bucket)
    form = activation_form(
        *(role.model, role.adapter, shape, role_work.head, device, entropy, role_work.scaled),
        role_work.capability,
    )
    form = form if teacher is None else replace(form, head=teacher)
    return (
        *state_items(name, trained.tensors, phase, role_work.moments),
        *activation_items(name, shape, work, form, phase),
        *backward_items(name, shape, work, form, Moment(phase, "backward"), shape.layers),
        *backward_items(name, shape, work, form, Moment(phase, "reduce"), trained.layers_left),
        *_forwards(role_work, replace(form, trained=False)),
    )


def _forwards(role_work: RoleWork, form: ActivationForm) -> Iterator[Allocation]:
    """Yield what forwards without a backward hold.

    They are those in which the role scores, and in which the actor's log-probs prove a sync.
    """
    phases: list[Phase] = ["score"] if role_work.scores else []
    phases += ["sync"] if role_work.name == "actor" else []
    for phase in phases:
        if Moment(phase, "forward") in role_work.moments:
            yield from activation_items(
                role_work.name, role_work.shape, role_work.work, form, phase
            )


@lru_cache(_KEPT)
def frozen_role(role: FrozenRole, role_work: RoleWork) -> tuple[Allocation, ...]:
    """Return what a role that only scores holds on one rank."""
    name, shape = role_work.name, role_work.shape
    device, moments = role_work.device, role_work.moments
    tensors = trainer_price(role).frozen(role, role_work)
    form = activation_form(
        *(role.model, None, shape, role_work.head, device, False, role_work.scaled),
        role_work.capability,
    )
    form, phase = replace(form, trained=False), scoring_phase(name, moments)
    return (
        *state_items(name, tensors, None, moments),
        *activation_items(name, shape, role_work.work, form, phase),
    )
