"""The price of a role: its memory on one rank, computed from its config without torch.

A role holds weights, states and activations; buffers for weights that are loaded, saved or sent to
engines; and a teacher's hidden states on their way to its student.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from plimsoll.config.cluster import Device, RankSleep
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.model.price.form import (
    ActivationForm,
    TeacherHead,
    activation_form,
    trained_parameters,
)
from plimsoll.resolve.decisions import Capability
from plimsoll.resolve.roles import Role
from plimsoll.resolve.run_spec import Phase
from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.sync.price import Sending, outgoing_buffer, sent_buckets
from plimsoll.timeline.items import (
    Allocation,
    Item,
    Moment,
    Tensors,
    Where,
    pinned_block,
    state_items,
)

_KEPT = 1024
"""How many prices are cached: a search for settings that fit makes hundreds of plans, in which many
roles are equal."""


@dataclass(frozen=True)
class RoleWork:
    """A role's model, and what one rank does with it.

    Attributes:
        work: The role's largest forward.
        ranks: The number of ranks that the role is divided over.
        moments: All moments of the job (`job_moments`).
        scaled: Whether the sampling temperature is not 1.
        capability: The lowest compute capability of the run's cards; None if unknown.
        first: Whether this is the first of the role's ranks, which collects its weights when they
            leave.
        scores: Whether the role does a forward in the phase `score`.
        rank_sleep: What moves to host memory while engines sample.
        copies_states: Whether the rank copies its states to host memory, to save them while it
            trains on.
    """

    role: Role
    shape: ModelShape
    work: MicroBatch
    ranks: int
    device: Device
    moments: frozenset[Moment]
    scaled: bool = False
    capability: Capability | None = None
    first: bool = True
    scores: bool = True
    rank_sleep: RankSleep = "none"
    copies_states: bool = False


@dataclass(frozen=True)
class TrainedTensors:
    """The tensors of a role that learns, on one rank.

    Attributes:
        tensors: Weights, states, gradients, buffers, and copies on the way in and out.
        layers_left: Layers whose activations are still kept when gradients are first reduced.
    """

    tensors: tuple[Tensors, ...]
    layers_left: int


@dataclass(frozen=True)
class SavedBytes:
    """The bytes that a checkpoint holds for each trained parameter."""

    masters: int
    moments: int
    average: int


_COARSE = "coarse: the engine has no price.py (trainer/price.py)"


def coarse_trained(role: TrainedRole, work: RoleWork, sending: Sending | None) -> TrainedTensors:
    """Return weights, gradients, and the fp32 masters and two moments of Adam, on every rank whole.

    This is the price of an engine that has none of its own.
    """
    count, element = trained_parameters(role, work.shape, work.role.head), role.model.element
    gradients = Tensors("gradients", "gradients", "trained", count, element, _COARSE)
    each = 8 if element == 4 else 12
    states = Tensors("optimizer states", "optimizer states", "trained", count, each, _COARSE)
    kept = (*coarse_frozen(role, work), gradients, replace(states, life="stepped"))
    return TrainedTensors(kept, layers_left=0)


def coarse_frozen(role: TrainedRole | FrozenRole, work: RoleWork) -> tuple[Tensors, ...]:
    """Return the whole weights, which each rank holds."""
    shape, element = work.shape, role.model.element
    count = shape.value_parameters if work.role.head == "value" else shape.parameters
    return (Tensors("weights", "weights", "parameters", count, element, _COARSE),)


@dataclass(frozen=True)
class TrainerPrice:
    """The functions that price a trainer engine's memory on one rank; without them it is coarse.

    Attributes:
        trained: Returns the tensors of a role that learns. Args: role, work, how weights go to
            engines (None without engines).
        frozen: Returns the tensors of a role that only scores. Args: role, work.
        saved: Returns the bytes that a checkpoint holds for each trained parameter of a role.
        division: Describes how a role is divided over the ranks, such as "stage 2".
        is_divided: Returns whether anything of a role is divided.
        has_head: Returns whether a role that only scores keeps its full output head on the device.
            Args: role, ranks, device.
    """

    trained: Callable[[TrainedRole, RoleWork, Sending | None], TrainedTensors] = coarse_trained
    frozen: Callable[[FrozenRole, RoleWork], tuple[Tensors, ...]] = coarse_frozen
    saved: Callable[[TrainedRole], SavedBytes] = lambda role: SavedBytes(4, 8, 0)
    division: Callable[[TrainedRole | FrozenRole], str] = lambda role: "no division"
    is_divided: Callable[[TrainedRole | FrozenRole], bool] = lambda role: False
    has_head: Callable[[FrozenRole, int, Device], bool] = lambda role, ranks, device: True


def trainer_price(role: TrainedRole | FrozenRole) -> TrainerPrice:
    """Return the price functions of the engine that the role's settings name, or coarse ones."""
    return cast(TrainerPrice, role.engine_value("price", TrainerPrice()))


@lru_cache(_KEPT)
def trained_role(
    role_work: RoleWork,
    *,
    entropy: bool = False,
    sending: Sending | None = None,
    teacher: TeacherHead | None = None,
) -> tuple[Allocation, ...]:
    """Return the memory of a trained role on one rank: items, and the moments of each.

    Args:
        role_work: The role's model, and what the rank does with it.
        entropy: Whether the head computes the entropy.
        sending: How the role's weights go to engines; None if they go to none.
        teacher: The teacher's head, for a student.
    """
    role, shape, work, device = role_work.role, role_work.shape, role_work.work, role_work.device
    settings, phase, name = role.trained, role.trains, role.name
    assert settings is not None and phase is not None, f"{name} only scores"
    trained = trainer_price(settings).trained(settings, role_work, sending)
    traits = role.head, device, entropy, role_work.scaled, role_work.capability
    form = activation_form(settings.model, settings.adapter, shape, *traits)
    form = form if teacher is None else replace(form, head=teacher)
    form = replace(form, trains_routers=settings.freeze != "router")
    return (
        *state_items(role, trained.tensors, role_work.moments),
        *activation_items(name, shape, work, form, phase),
        *backward_items(name, shape, work, form, Moment(phase, "backward"), shape.layers),
        *backward_items(name, shape, work, form, Moment(phase, "reduce"), trained.layers_left),
        *_forwards(role_work, replace(form, trained=False)),
    )


def _forwards(role_work: RoleWork, form: ActivationForm) -> Iterator[Allocation]:
    """Yield the activations of forward passes that have no backward pass.

    In these the role scores, or computes the log-probs that verify a sync of its weights.
    """
    role = role_work.role
    phases: list[Phase] = ["score"] if role_work.scores else []
    phases += ["sync"] if role.sends else []
    for phase in phases:
        if Moment(phase, "forward") in role_work.moments:
            yield from activation_items(role.name, role_work.shape, role_work.work, form, phase)


@lru_cache(_KEPT)
def frozen_role(role_work: RoleWork) -> tuple[Allocation, ...]:
    """Return the memory on one rank of a role that only scores: items, and the moments of each."""
    role, shape, settings = role_work.role, role_work.shape, role_work.role.frozen
    assert settings is not None, f"{role.name} has no weights of its own"
    tensors = trainer_price(settings).frozen(settings, role_work)
    traits = role.head, role_work.device, False, role_work.scaled, role_work.capability
    form = replace(activation_form(settings.model, None, shape, *traits), trained=False)
    return (
        *state_items(role, tensors, role_work.moments),
        *activation_items(role.name, shape, role_work.work, form, role.scoring_phase),
    )


SAVE_BUCKET = 2**30
"""Bytes of weights that are gathered at once when a model is saved."""
CHECKPOINT_FILE = 2**28
"""Bytes of stretches in one file of a checkpoint, at most."""


def loading_tensors(
    shape: ModelShape, element: int, quantized: int, device: Device
) -> Iterator[Tensors]:
    """Yield the temporary tensors of loading a model.

    Weights are mapped from the checkpoint's files (page cache, which the system can reclaim), and
    are cast and copied to the device one by one. On CPU, weights to be quantised are read ahead.
    """
    if device == "cpu":
        name, of = "weights to quantise", "read to be quantised"
        source = "transformers, core_model_loading.py: threads read ahead"
        yield Tensors("weights", name, of, quantized, element, source, where="host", life="loading")
    name, of, size = "copy while loading", "of the largest tensor", shape.largest_parameter
    source = "trainer/zero/frozen.py: one weight at a time, from files that are mapped"
    yield Tensors("buffers", name, of, size, element, source, where="host", life="loading")


def outgoing_tensors(
    work: RoleWork, sending: Sending | None, *, saved: int, every: int, gathers: bool
) -> Iterator[Tensors]:
    """Yield the buffers of a role's weights on their way to engines and to files.

    Args:
        work: The role's model, and what the rank does with it.
        sending: How the weights go to engines; None without engines.
        saved: Bytes of the parameters that are saved: an adapter's alone if one learns.
        every: Bytes of all parameters, those in 4 bits as they are stored.
        gathers: Whether the engine divides the weights, and gathers them bucket by bucket on every
            rank.
    """
    if gathers:
        bucket = 0 if sending is None else min(sending.gathered, every)
        where: Where = "device" if work.device == "cuda" else "host"
        source = "trainer/protocol.py: gather"
        gathered = outgoing_buffer("gathered weights", bucket, source, where)
        yield replace(gathered, life="sending")
        yield replace(gathered, elements=min(SAVE_BUCKET, saved), life="saving")
    if sending is not None and (work.first or sending.route == "ipc"):
        yield from sent_buckets(sending, work.device)
    if work.first:
        source = "trainer/weights.py: write_model collects on rank 0"
        yield replace(outgoing_buffer("model to save", saved, source, "host"), life="saving")


def teacher_items(
    teacher: Role,
    learns: Phase,
    shape: ModelShape,
    tokens: int,
    moments: frozenset[Moment],
    *,
    has_head: bool,
    pinned: int = 0,
) -> Iterator[Allocation]:
    """Yield the memory that a student needs of its teacher: hidden states, and the head.

    Args:
        teacher: The role that teaches.
        learns: The phase in which the student learns.
        shape: The teacher's shape.
        tokens: Tokens of a step on one rank.
        moments: All moments of the job.
        has_head: Whether the teacher's engine has the full head on the device already.
        pinned: Tokens of a micro-batch, whose states are a pinned block on the host; 0 on the CPU.
    """
    element, hidden, vocabulary = teacher.model.element, shape.hidden, shape.vocabulary

    def item(name: str, where: Where, size: int, words: str) -> Item:
        formula = f"{element} bytes x {words} x {hidden:,}"
        source = "trainer/objectives.py"
        return Item(teacher.name, "frozen models", name, where, "allocated", size, formula, source)

    words = f"{tokens:,} tokens of a step"
    size = element * tokens * hidden
    if pinned:
        size = -(-tokens // pinned) * pinned_block(element * pinned * hidden)
        words += f", {pinned:,} in a pinned block of a power of two,"
    states = item("hidden states", "host", size, words)
    yield Allocation(states, frozenset(moment for moment in moments if moment.phase != "load"))
    if not has_head:
        words = f"{vocabulary:,} of the vocabulary"
        head = item("gathered head", "device", element * vocabulary * hidden, words)
        compared = {Moment(learns, "forward_backward"), Moment("score", "forward")}
        yield Allocation(head, moments & compared)
