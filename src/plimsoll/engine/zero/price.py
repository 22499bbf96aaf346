"""What ZeRO holds on one rank, for a role that learns and for one that only scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ELEMENT_BYTES
from plimsoll.engine.price.roles import RoleWork, SavedBytes, TrainedTensors, TrainerPrice
from plimsoll.engine.price.transfers import CHECKPOINT_FILE, Outgoing, leaving, loading
from plimsoll.engine.zero.buffers import layers_left, made_on_cpu, norm_copies, second_copy
from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.engine.zero.settings import deepspeed_settings, frozen_settings
from plimsoll.engine.zero.sizes import (
    Counts,
    ZeroSizes,
    frozen_counts,
    moment_bytes,
    trained_counts,
    zero_sizes,
)
from plimsoll.engine.zero.states import weights, zero_states
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.timeline.items import Where
from plimsoll.timeline.tensors import Tensors

_WHOLE = ZeroSizes(stage=0, ranks=1, accumulate=4, bucket=0)
"""The sizes of a frozen model that every rank has whole."""


def _trained(role: TrainedRole, own: RoleWork, sync_bucket: int) -> TrainedTensors:
    shape, device = own.shape, own.device
    settings: Any = deepspeed_settings(role, device, own.ranks)
    sizes = zero_sizes(settings, own.ranks)
    counts, adapted = trained_counts(role, shape, own.head, sizes), role.adapter is not None
    kept = [*zero_states(counts, sizes, device), *_beside(counts, sizes, device, role)]
    kept += norm_copies(counts, sizes, device)
    if device == "cpu":
        kept += made_on_cpu(counts, sizes, role.optimizer)
    kept += loading(shape, counts.element, counts.quantized, device)
    if own.name == "actor":
        outgoing = _outgoing(counts, sizes, adapted)
        kept += leaving(outgoing, device, sync_bucket, own.first)
    return TrainedTensors(tuple(kept), layers_left(shape, counts.trained, sizes, adapted))


def _outgoing(counts: Counts, sizes: ZeroSizes, adapted: bool) -> Outgoing:
    trained = counts.trained * counts.element
    every = trained + counts.frozen * counts.element + counts.quantized // 2
    return Outgoing(trained, every, adapted, gathers=sizes.stage == 3 and sizes.ranks > 1)


def _beside(
    counts: Counts, sizes: ZeroSizes, device: Device, role: TrainedRole
) -> Iterator[Tensors]:
    """Yield a moving average, a second copy of the weights, and what is written.

    The average is in fp32, on the masters' device and divided as they are.
    """
    ranks = sizes.ranks if sizes.stage > 0 else 1
    each = 4 if role.ema is not None else 0
    if each:
        where: Where = "device" if device == "cuda" and not sizes.offload else "host"
        name, of = "moving average of masters", "trained parameters"
        source, count = "engine/average.py", counts.trained
        yield Tensors("optimizer states", name, of, count, each, source, ranks, where, "built")
    zero = role.settings_of(ZeroConfig)
    if zero.hpz_partition_size > 1:
        yield second_copy(counts, zero.hpz_partition_size)
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


def _frozen(role: FrozenRole, own: RoleWork) -> tuple[Tensors, ...]:
    shape, device, sizes = own.shape, own.device, _WHOLE
    if _frozen_settings(role).stage == 3:
        settings: Any = frozen_settings(role, device, own.ranks)
        sizes = zero_sizes(settings, own.ranks)
    counts = frozen_counts(role.model, shape, own.head, sizes)
    if sizes is _WHOLE:
        kept = [*_whole_model(role, counts, own)]
    else:
        kept = [*zero_states(counts, sizes, device)]
    return (*kept, *loading(shape, counts.element, counts.quantized, device))


def _whole_model(role: FrozenRole, counts: Counts, own: RoleWork) -> Iterator[Tensors]:
    """Yield a copy on every rank.

    Offloaded, it is in host memory, with one on the device while it scores.
    """
    made = weights(counts, _WHOLE)
    if own.device == "cpu":
        yield from (replace(one, where="host") for one in made)
        return
    if _frozen_settings(role).offload == "none":
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
            "engine/zero/frozen.py: each parameter pinned by itself",
            where="host",
            pinned=tensors.elements,
        )


def _frozen_settings(role: FrozenRole) -> FrozenZeroConfig:
    return role.settings_of(FrozenZeroConfig)


def _saved(role: TrainedRole) -> SavedBytes:
    masters = ELEMENT_BYTES[role.settings_of(ZeroConfig).state_dtype]
    return SavedBytes(masters, round(moment_bytes(role)), 4 if role.ema is not None else 0)


def _stage(role: TrainedRole | FrozenRole) -> int:
    if isinstance(role, FrozenRole):
        return _frozen_settings(role).stage
    return role.settings_of(ZeroConfig).stage


def _has_head(role: FrozenRole, ranks: int, device: Device) -> bool:
    zero = _frozen_settings(role)
    divided = zero.stage == 3 and ranks > 1
    return not divided and not (zero.offload == "cpu" and device == "cuda")


PRICE = TrainerPrice(
    trained=_trained,
    frozen=_frozen,
    saved=_saved,
    division=lambda role: f"stage {_stage(role)}",
    is_divided=lambda role: _stage(role) > 0,
    has_head=_has_head,
)
