"""What the host keeps of a vLLM engine that sleeps at level 1: its weights, in pinned memory.

vLLM 0.32 copies each segment of its allocator by itself (device_allocator/cumem.py, `sleep`), and
PyTorch makes every pinned block a power of two. A segment (c10/core/AllocatorConfig.h) is one
tensor from 10 MiB on, in whole steps of 2 MiB; smaller tensors share segments of 20 MiB, and those
of up to 1 MiB of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from plimsoll.memory.items import Held, Item, Moment
from plimsoll.memory.price.engines import Sampler
from plimsoll.memory.price.layer import GATES, QUERIES, UPS
from plimsoll.memory.price.states import pinned_block
from plimsoll.shapes.shape import Linear, Tensors, parameter_tensors

_MIB = 2**20
_STEP, _SHARED = 2 * _MIB, 20 * _MIB


def sleep_items(sampler: Sampler, moments: frozenset[Moment]) -> tuple[Held, ...]:
    """The host copy of a worker's weights at sleep level 1. Its pinned blocks go back to torch's
    cache when the engine wakes, not to the system, so they stay.
    """
    if sampler.rollout.sleep_level != 1:
        return ()
    item = Item(
        role="rollout",
        name="weights of a sleeping engine",
        where="host",
        level="allocated",
        bytes=pinned_copy(sampler),
        formula=f"{sampler.weights:,} bytes of weights ({sampler.element} bytes x "
        f"{sampler.shape.parameters:,} parameters / tensor parallel "
        f"{sampler.rollout.tensor_parallel}), each pinned block a power of two",
        source="vLLM 0.32: device_allocator/cumem.py; ATen/core/CachingHostAllocator.h",
    )
    return (Held(item, frozenset(m for m in moments if m.phase != "load")),)


def pinned_copy(sampler: Sampler) -> int:
    """Bytes of all pinned blocks."""
    shape, parallel = sampler.shape, sampler.rollout.tensor_parallel
    merged = replace(shape, linears=tuple(_merged(shape.linears)), other_tensors=())
    divided = (
        Tensors(-(-one.elements // parallel), -(-one.parameters // parallel))
        for one in parameter_tensors(merged)
    )
    tensors = [
        (one.elements * sampler.element, one.parameters // one.elements)
        for one in (*divided, *shape.other_tensors)
    ]
    small = sum(size * number for size, number in tensors if size <= _MIB)
    return _whole(small, _STEP) + sum(_blocks(*one) for one in tensors if one[0] > _MIB)


def _blocks(size: int, number: int) -> int:
    """Of so many tensors of more than 1 MiB."""
    if size < _SHARED // 2:
        return -(-number // (_SHARED // size)) * pinned_block(_SHARED)
    return number * pinned_block(_whole(size, _STEP))


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


def _merged(linears: Sequence[Linear]) -> Iterator[Linear]:
    """As vLLM has them: queries, keys and values in one, gate and up in one."""
    parts: dict[tuple[object, ...], Linear] = {}
    for place, linear in enumerate(linears):
        together = linear.stacked == 1 and linear.name in (*QUERIES, *GATES, *UPS)
        reads = linear.name in QUERIES, linear.inputs, linear.count
        key = reads if together else (place,)
        outputs = linear.outputs + (parts[key].outputs if key in parts else 0)
        parts[key] = replace(linear, outputs=outputs)
    yield from parts.values()
