"""What ZeRO holds on one rank, for a role that learns and for a role that only scores.

Of ranks that sleep, that is what leaves the card, and its copies in pinned host memory. sleep.py
copies each storage by itself, into a pinned block whose size is a power of two. Blocks go back to
PyTorch's cache when a rank wakes, not to the system, so they stay from the first sleep on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plimsoll.config.cluster import Device
from plimsoll.config.engine import ELEMENT_BYTES, FrozenRole, TrainedRole
from plimsoll.model.price.form import adapter_tensors, frozen_parameters, whole_tensors
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Life, Tensors, Where, states_asleep, weights_asleep
from plimsoll.trainer.price import (
    CHECKPOINT_FILE,
    RoleWork,
    SavedBytes,
    TrainedTensors,
    TrainerPrice,
    loading_tensors,
    outgoing_tensors,
)
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.settings import (
    Counts,
    ZeroSizes,
    deepspeed_settings,
    frozen_counts,
    frozen_settings,
    moment_bytes,
    trained_counts,
    zero_sizes,
)
from plimsoll.trainer.zero.states import (
    BOTH_TABLES,
    REDUCE_BUCKET,
    cpu_copies,
    layers_left,
    norm_copies,
    second_copy,
    weights,
    zero_states,
)

_WHOLE = ZeroSizes(stage=0, ranks=1, accumulate=4, bucket=0)
"""The sizes of a frozen model of which every rank has a full copy."""


_BETWEEN_STEPS: tuple[Life, ...] = ("always", "built", "stepped")
_TRAINED = "trained parameters"

Pieces = Mapping[str, Sequence[tuple[int, int]]]
"""The storages of tensors that lie one by one: (elements of each, count), by `Tensors.of`."""


def _trained_tensors(role: TrainedRole, work: RoleWork, sending: Sending | None) -> TrainedTensors:
    """Return the sizes of all tensors that one rank holds for a role that learns."""
    shape, device = work.shape, work.device
    settings: Any = deepspeed_settings(role, device, work.ranks)
    sizes = zero_sizes(settings, work.ranks)
    counts, adapted = trained_counts(role, shape, work.role.head, sizes), role.adapter is not None
    tensors = [*zero_states(counts, sizes, device)]
    tensors += _average_and_buffers(counts, sizes, role, work)
    tensors += norm_copies(counts, sizes, device)
    if device == "cpu":
        tensors += cpu_copies(counts, sizes, role.optimizer)
    tensors += loading_tensors(shape, counts.element, counts.quantized, device)
    if work.role.sends:
        trained = counts.trained * counts.element
        every = trained + counts.frozen * counts.element + counts.quantized // 2
        saved, gathers = trained if adapted else every, sizes.stage == 3 and sizes.ranks > 1
        tensors += outgoing_tensors(work, sending, saved=saved, every=every, gathers=gathers)
    tensors = [*with_sleep(tensors, sizes, role, work)]
    whole = BOTH_TABLES if role.adapter is None else role.adapter.modules_to_save
    return TrainedTensors(tuple(tensors), layers_left(shape, counts.trained, sizes, whole))


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
    masters = ELEMENT_BYTES[zero.state_dtype]
    states = round((masters + counts.moments + each) * counts.trained / ranks)
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
    counts = frozen_counts(role.model, shape, work.role.head, sizes)
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
    source = "trainer/zero/frozen.py: each parameter pinned by itself"
    host = Tensors("weights", "weights in host memory", "parameters", 0, counts.element, source)
    for tensors in parameter_tensors(work.shape, work.role.head == "value"):
        yield replace(host, elements=tensors.parameters, where="host", pinned=tensors.elements)


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


def with_sleep(
    tensors: Iterable[Tensors], sizes: ZeroSizes, role: TrainedRole | FrozenRole, work: RoleWork
) -> Iterator[Tensors]:
    """Yield a role's tensors, without those asleep while they sleep, and their copies."""
    states = states_asleep(work.rank_sleep)
    weights = weights_asleep(work.rank_sleep, work.role)
    pieces = _pieces(sizes, role, work)
    for tensor in tensors:
        asleep = weights if tensor.kind == "weights" else states
        moves = tensor.where == "device" and tensor.life in _BETWEEN_STEPS and tensor.elements
        if not (asleep and moves):
            yield tensor
            continue
        yield replace(tensor, asleep=asleep)
        if tensor.name != REDUCE_BUCKET:  # it holds nothing between steps
            yield from _copies(tensor, sizes, pieces)


def _copies(tensor: Tensors, sizes: ZeroSizes, pieces: Pieces) -> Iterator[Tensors]:
    """Yield the host copies of a tensor: of DeepSpeed's flat buffers, or of each storage."""
    name, source = f"{tensor.name} asleep", f"trainer/zero/sleep.py; {tensor.source}"
    copy = replace(tensor, name=name, where="host", life="stepped", source=source)
    if tensor.of not in pieces or (tensor.of == _TRAINED and sizes.stage > 0):
        share = -(-tensor.elements // tensor.ranks)
        in_groups = sizes.stage == 3 and tensor.kind == "optimizer states"
        yield replace(copy, pinned=min(share, sizes.sub_group) if in_groups else share)
        return
    for elements, count in pieces[tensor.of]:
        yield replace(copy, elements=elements * count, pinned=-(-elements // tensor.ranks))


def _pieces(sizes: ZeroSizes, role: TrainedRole | FrozenRole, work: RoleWork) -> Pieces:
    shape, in_4_bits = work.shape, role.model.quantization == "nf4"
    every = [
        (tensors.elements, tensors.parameters // tensors.elements)
        for tensors in parameter_tensors(shape, work.role.head == "value")
    ]
    linears = [
        (linear.inputs * linear.outputs, linear.count)
        for linear in shape.linears
        if linear.stacked == 1 and in_4_bits
    ]
    narrow = {elements for elements, _ in linears}
    plain = [piece for piece in every if piece[0] not in narrow]
    adapter = role.adapter if isinstance(role, TrainedRole) else None
    pairs = [] if adapter is None else [(size, n) for n, size in adapter_tensors(shape, adapter)]
    whole = [] if adapter is None else [(size, 1) for size in whole_tensors(shape, adapter)]
    learned = [*pairs, *whole] or every
    if isinstance(role, TrainedRole) and adapter is None and frozen_parameters(role, shape):
        routers = shape.routers.elements, shape.routers.parameters // shape.routers.elements
        learned, plain = [piece for piece in every if piece != routers], [routers]
    return {
        _TRAINED: learned,
        "frozen parameters": plain,
        "parameters in 4 bits": linears,
        "parameters": [*every, *pairs],
        "of small tensors": [p for p in (*plain, *pairs) if p[0] <= sizes.persistence],
    }


PRICE = TrainerPrice(
    trained=_trained_tensors,
    frozen=_frozen_tensors,
    saved=_saved_bytes,
    division=lambda role: f"stage {_stage(role)}",
    is_divided=lambda role: _stage(role) > 0,
    has_head=_has_head,
)
