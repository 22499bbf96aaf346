"""What ZeRO holds on one rank, for a role that learns and for a role that only scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.engine import ELEMENT_BYTES, FrozenRole, TrainedRole
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Life, Tensors, Where
from plimsoll.trainer.price import (
    CHECKPOINT_FILE,
    Outgoing,
    RoleWork,
    SavedBytes,
    TrainedTensors,
    TrainerPrice,
    loading_tensors,
    outgoing_tensors,
)
from plimsoll.trainer.zero.buffers import (
    BOTH_TABLES,
    cpu_copies,
    layers_left,
    norm_copies,
    second_copy,
)
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.settings import deepspeed_settings, frozen_settings
from plimsoll.trainer.zero.sizes import (
    Counts,
    ZeroSizes,
    frozen_counts,
    moment_bytes,
    trained_counts,
    zero_sizes,
)
from plimsoll.trainer.zero.sleep_price import with_sleep
from plimsoll.trainer.zero.states import weights, zero_states

_WHOLE = ZeroSizes(stage=0, ranks=1, accumulate=4, bucket=0)
"""The sizes of a frozen model of which every rank has a full copy."""


def _trained_tensors(role: TrainedRole, work: RoleWork, sending: Sending | None) -> TrainedTensors:
    """Return the sizes of all tensors that one rank holds for a role that learns."""
    shape, device = work.shape, work.device
    settings: Any = deepspeed_settings(role, device, work.ranks)
    sizes = zero_sizes(settings, work.ranks)
    counts, adapted = trained_counts(role, shape, work.head, sizes), role.adapter is not None
    tensors = [
        *zero_states(counts, sizes, device),
        *_average_and_buffers(counts, sizes, role, work),
    ]
    tensors += norm_copies(counts, sizes, device)
    if device == "cpu":
        tensors += cpu_copies(counts, sizes, role.optimizer)
    tensors += loading_tensors(shape, counts.element, counts.quantized, device)
    if work.name == "actor":
        outgoing = _outgoing(counts, sizes, adapted)
        tensors += outgoing_tensors(outgoing, device, sending, work.first)
    tensors = [*with_sleep(tensors, sizes, role, work)]
    whole = BOTH_TABLES if role.adapter is None else role.adapter.modules_to_save
    return TrainedTensors(tuple(tensors), layers_left(shape, counts.trained, sizes, whole))


def _outgoing(counts: Counts, sizes: ZeroSizes, adapted: bool) -> Outgoing:
    """Return the bytes of the weights that one rank saves or sends."""
    trained = counts.trained * counts.element
    all_bytes = trained + counts.frozen * counts.element + counts.quantized // 2
    return Outgoing(trained, all_bytes, adapted, gathers=sizes.stage == 3 and sizes.ranks > 1)


def _average_and_buffers(
    counts: Counts, sizes: ZeroSizes, role: TrainedRole, work: RoleWork
) -> Iterator[Tensors]:
    """Yield the sizes of the moving average, ZeRO++'s second copy and what a checkpoint copies.

    The average is in fp32, on the masters' device and divided as they are. A checkpoint in the
    background is copied as a whole, and its copy may be there in any later phase; at stage 0 only
    the first rank writes one. Any other checkpoint is copied file by file.
    """
    ranks = sizes.ranks if sizes.stage > 0 else 1
    each = 4 if role.ema is not None else 0
    if each:
        where: Where = "device" if work.device == "cuda" and not sizes.offload else "host"
        name, of = "moving average of masters", "trained parameters"
        source, count = "trainer/zero/masters.py", counts.trained
        yield Tensors("optimizer states", name, of, count, each, source, ranks, where, "built")
    zero = role.settings_of(ZeroConfig)
    if zero.hpz_partition_size > 1:
        yield second_copy(counts, zero.hpz_partition_size)
    states = round((4 + counts.moments + each) * counts.trained / ranks)
    life: Life = "writing"
    name, of = "checkpoint file", "bytes: of a file that is gathered, and of the one before"
    size = min(2 * CHECKPOINT_FILE, states)
    if work.copies_states and (sizes.stage > 0 or work.first):
        name, of, size, life = "copy of a checkpoint", "bytes of states", states, "stepped"
    source = "trainer/checkpoint.py: write_files"
    yield Tensors("buffers", name, of, size, 1, source, where="host", life=life)


def _frozen_tensors(role: FrozenRole, work: RoleWork) -> tuple[Tensors, ...]:
    """Return the sizes of all tensors that one rank holds for a role that only scores."""
    shape, device, sizes = work.shape, work.device, _WHOLE
    if _frozen_settings(role).stage == 3:
        settings: Any = frozen_settings(role, device, work.ranks)
        sizes = zero_sizes(settings, work.ranks)
    counts = frozen_counts(role.model, shape, work.head, sizes)
    if sizes is _WHOLE:
        tensors = [*_whole_model(role, counts, work)]
    else:
        tensors = [*zero_states(counts, sizes, device)]
    tensors = [*with_sleep(tensors, sizes, role, work)]
    return (*tensors, *loading_tensors(shape, counts.element, counts.quantized, device))


def _whole_model(role: FrozenRole, counts: Counts, work: RoleWork) -> Iterator[Tensors]:
    """Yield the weights of a model that is not divided.

    If it is offloaded, it is in host memory, with a copy on the device while the role scores.
    """
    copies = weights(counts, _WHOLE)
    if work.device == "cpu":
        yield from (replace(tensor, where="host") for tensor in copies)
        return
    if _frozen_settings(role).offload == "none":
        yield from copies
        return
    yield from (replace(tensor, life="scoring") for tensor in copies)
    for tensors in parameter_tensors(work.shape, work.head == "value"):
        yield Tensors(
            "weights",
            "weights in host memory",
            "parameters",
            tensors.parameters,
            counts.element,
            "trainer/zero/frozen.py: each parameter pinned by itself",
            where="host",
            pinned=tensors.elements,
        )


def _frozen_settings(role: FrozenRole) -> FrozenZeroConfig:
    return role.settings_of(FrozenZeroConfig)


def _saved_bytes(role: TrainedRole) -> SavedBytes:
    """Return the bytes per trained parameter that a checkpoint file holds."""
    masters = ELEMENT_BYTES[role.settings_of(ZeroConfig).state_dtype]
    return SavedBytes(masters, round(moment_bytes(role)), 4 if role.ema is not None else 0)


def _stage(role: TrainedRole | FrozenRole) -> int:
    if isinstance(role, FrozenRole):
        return _frozen_settings(role).stage
    return role.settings_of(ZeroConfig).stage


def _has_head(role: FrozenRole, ranks: int, device: Device) -> bool:
    """Return whether the whole output head is on the device of every rank at all times."""
    zero = _frozen_settings(role)
    divided = zero.stage == 3 and ranks > 1
    return not divided and not (zero.offload == "cpu" and device == "cuda")


PRICE = TrainerPrice(
    trained=_trained_tensors,
    frozen=_frozen_tensors,
    saved=_saved_bytes,
    division=lambda role: f"stage {_stage(role)}",
    is_divided=lambda role: _stage(role) > 0,
    has_head=_has_head,
)
