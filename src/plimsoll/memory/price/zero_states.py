"""What DeepSpeed ZeRO 0.19.8 keeps for one trained role on one rank, with our settings.

Read in its source, and checked against the tensors that its engines really hold
(tests/integration/test_memory_zero_states.py). It departs from the textbook's 16 bytes a parameter:

- stage 1 in bfloat16 keeps whole fp32 gradients on every rank (runtime/bf16_optimizer.py);
- stage 2 with fp32 accumulation keeps its share of fp32 gradients on the device from the first
  backward to the step, also where the optimizer is offloaded (zero/stage_1_and_2.py,
  _build_compact_grad_partition_buffer);
- stage 3 keeps its share of accumulated gradients always, and copies one sub-group of it for the
  step (zero/stage3.py, _setup_for_real_optimizer, _prepare_fp32_grad_for_sub_group);
- stage 3 on one rank uses its weights where they lie and gathers nothing;
- stage 3 with states in bfloat16 copies the weights as masters (its _create_fp32_partitions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from plimsoll.config.deepspeed import Device
from plimsoll.memory.items import Where
from plimsoll.memory.price.division import (
    Counts,
    ZeroSizes,
    is_bf16_optimizer,
    is_compact,
    largest_share,
)
from plimsoll.memory.price.lifetimes import Life
from plimsoll.memory.price.states import Kept

_STAGE12 = "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py"
_STAGE3 = "DeepSpeed 0.19.8, runtime/zero/stage3.py"
_BF16 = "DeepSpeed 0.19.8, runtime/bf16_optimizer.py"
_STAGE0 = "DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and runtime/engine.py"
_LARGEST = "of the largest tensor"
_ALLREDUCE = 500_000_000  # elements: DeepSpeedEngine.buffered_allreduce_fallback


def zero_states(counts: Counts, sizes: ZeroSizes, device: Device) -> tuple[Kept, ...]:
    """Everything of the role on one rank; in host memory all of it where that is the device.

    There a bucket weighs what is written to it: the system gives pages at their first use.
    """
    if device == "cuda":
        return (*weights(counts, sizes), *_trained(counts, sizes))
    touched = replace(sizes, bucket=min(sizes.bucket, counts.trained))
    made = (*weights(counts, touched), *_trained(counts, touched))
    return tuple(replace(one, where="host", pinned=0) for one in made)


def weights(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    """The weights themselves: whole, or a share and what is gathered of the others' shares."""
    divided = sizes.stage == 3
    ranks = sizes.ranks if divided else 1
    where: Where = "host" if sizes.offload_weights else "device"
    pinned = where == "host" and sizes.pinned
    source = _STAGE3 if divided else "one copy on every rank"
    kinds = (
        ("weights", "trained parameters", counts.trained, counts.element),
        ("frozen weights", "frozen parameters", counts.frozen, counts.element),
        ("4-bit weights", "parameters in 4 bits", counts.quantized, 0.5),
    )
    for name, of, elements, each in kinds:
        block = -(-elements // ranks) if pinned else 0
        yield Kept(name, of, elements, each, source, ranks, where, "always", block)
    yield Kept(
        "scales of 4-bit weights",
        "parameters in 4 bits",
        counts.quantized,
        counts.scales,
        "QLoRA, arXiv 2305.14314, section 3: scales of blocks of 64, not divided by ZeRO",
    )
    if divided and (ranks > 1 or sizes.offload_weights):
        yield from _gathered(counts, sizes)


def _gathered(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    source = "DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py"
    codes = counts.quantized // 2 // counts.element
    rest = counts.trained + counts.frozen + codes - counts.small
    live = min(rest, max(sizes.live, counts.largest))
    each = counts.element
    yield Kept("small parameters kept whole", "of small tensors", counts.small, each, source)
    yield Kept("live parameters", "gathered", live, each, source, life="computing")
    ahead = min(sizes.prefetch, rest - live)
    yield Kept("prefetch bucket", "on their way", ahead, each, source, life="computing")


def _trained(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    if not counts.trained:
        return
    if sizes.stage == 0:
        yield from _stage_0(counts)
    elif sizes.stage == 3:
        yield from _stage_3(counts, sizes)
    elif is_bf16_optimizer(counts, sizes):
        yield from _stage_1_bf16(counts, sizes)
    else:
        yield from _stage_1_and_2(counts, sizes)


def _stage_0(counts: Counts) -> Iterator[Kept]:
    states = partial(_of_trained, counts, _STAGE0)
    yield states("gradients", counts.element, life="training")
    if counts.element == 4:
        yield states("moments", counts.moments, life="stepped")
        copied = min(counts.trained, _ALLREDUCE)
        yield Kept("copy to reduce", "gradients", copied, 4, _STAGE0, life="stepping")
        return
    yield states("fp32 masters", 4, life="built")
    yield states("moments", counts.moments, life="built")
    yield states("fp32 gradients", 4, life="stepping")
    yield states("gradients of a dry step", counts.element + 4, life="building")


def _stage_1_bf16(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    states = partial(_of_trained, counts, _BF16)
    yield states("fp32 masters", 4, sizes.ranks, life="built")
    yield states("fp32 gradients", 4, life="built")
    yield states("moments", counts.moments, sizes.ranks, life="stepped")
    yield states("gradients", 2, life="training")
    yield replace(_incoming(counts, 4, _BF16), life="backward")
    copied = min(counts.trained, _ALLREDUCE)
    yield Kept("copies to reduce", "gradients in fp32, bf16", copied, 6, _BF16, life="stepping")
    yield states("flat copy of weights", 2, life="building")


def _stage_1_and_2(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    states = partial(_of_trained, counts, _STAGE12)
    yield from _optimizer(counts, sizes, _STAGE12)
    if sizes.offload:
        yield from _staging(counts, sizes)
    if sizes.stage == 1:
        each, bucket = sizes.accumulate, sizes.bucket
        yield states("gradients", each, life="training")
        yield Kept("reduce bucket", "elements", bucket, each, _STAGE12, life="training")
        share = states("share of gradients", each, sizes.ranks, life="norming")
        yield share if sizes.offload else replace(share, each=sizes.master, life="stepping")
    else:
        yield from _stage_2_gradients(counts, sizes)
    yield _reduce_copy(counts, sizes, _STAGE12)
    yield _incoming(counts, counts.element, _STAGE12)
    yield states("flat copy of weights", counts.element, life="building")


def _stage_2_gradients(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    states, each = partial(_of_trained, counts, _STAGE12), counts.element
    bucket, oversized = sizes.bucket, counts.oversized
    of = "in tensors larger than a bucket"
    yield Kept("reduce bucket", "elements", bucket, each, _STAGE12, life="backward")
    yield Kept("oversized gradients", of, oversized, each, _STAGE12, sizes.ranks, life="backward")
    if is_compact(counts, sizes):
        yield states("fp32 gradients", 4, sizes.ranks, life="training")
        if sizes.master < 4 and not sizes.offload:
            yield states("narrowed gradients", sizes.master, sizes.ranks, life="stepping")
        yield _widened(counts, sizes, _STAGE12)
    elif sizes.offload and sizes.master < 4:
        return  # they are added up in those of the optimizer
    elif sizes.offload:
        block = -(-counts.largest // sizes.ranks) if sizes.pinned else 0
        yield states("gradients", each, sizes.ranks, "host", "stepped", block)
    else:
        wide = each if each == sizes.master else each + sizes.master  # flattened, then widened
        yield states("gradients", each, sizes.ranks, life="training")
        yield states("gradients of a micro-batch", each, sizes.ranks, life="backward")
        yield states("flat gradients", wide, sizes.ranks, life="stepping")


def _stage_3(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    states = partial(_of_trained, counts, _STAGE3)
    yield from _optimizer(counts, sizes, _STAGE3)
    share = -(-counts.trained // sizes.ranks)
    name, each = "accumulated gradients", sizes.accumulate
    if sizes.offload:
        block = share if sizes.pinned else 0
        yield states(name, each, sizes.ranks, "host", "built", block)
    else:
        copied = min(share, sizes.sub_group)
        yield states(name, each, sizes.ranks, life="built")
        wide = sizes.master + (each if each != sizes.master else 0)  # flattened, then cast
        yield Kept("copy of a sub-group", "gradients", copied, wide, _STAGE3, life="stepping")
    yield Kept("reduce bucket", "elements", sizes.bucket, counts.element, _STAGE3, life="built")
    yield _reduce_copy(counts, sizes, _STAGE3)
    if each != counts.element:
        yield _widened(counts, sizes, _STAGE3)
    yield _incoming(counts, counts.element, _STAGE3)


def _optimizer(counts: Counts, sizes: ZeroSizes, source: str) -> Iterator[Kept]:
    """Masters and moments; offloaded, also the gradients that DeepSpeedCPUAdam reads. Stage 3 does
    not pin its masters."""
    states, ranks = partial(_of_trained, counts, source), sizes.ranks
    each, dtype = sizes.master, "fp32" if sizes.master == 4 else "bf16"
    if not sizes.offload:
        yield states(f"{dtype} masters", each, ranks, life="built")
        yield states("moments", counts.moments, ranks, life="stepped")
        return
    share = -(-counts.trained // ranks)
    group = min(share, sizes.sub_group) if sizes.stage == 3 else share
    block = group if sizes.pinned else 0
    masters = 0 if sizes.stage == 3 else block
    yield states(f"{dtype} masters", each, ranks, "host", "built", masters)
    yield states("moments", counts.moments, ranks, "host", "stepped")
    name = f"{dtype} gradients of the optimizer"
    yield states(name, each, ranks, "host", "built", block)


def _staging(counts: Counts, sizes: ZeroSizes) -> Iterator[Kept]:
    """Stages 1 and 2 with the optimizer on the host: updated weights on their way to the device,
    and two buffers of one gradient."""
    share = -(-counts.trained // sizes.ranks) if sizes.pinned else 0
    each = counts.element
    yield _of_trained(counts, _STAGE12, "staging buffer", each, sizes.ranks, "host", "built", share)
    buffer = Kept("gradient buffer", _LARGEST, counts.largest, each, _STAGE12, life="built")
    yield from (buffer, replace(buffer, where="host", pinned=counts.largest if sizes.pinned else 0))


def _of_trained(
    counts: Counts,
    source: str,
    name: str,
    each: float,
    ranks: int = 1,
    where: Where = "device",
    life: Life = "always",
    pinned: int = 0,
) -> Kept:
    return Kept(
        name, "trained parameters", counts.trained, each, source, ranks, where, life, pinned
    )


def _incoming(counts: Counts, each: int, source: str) -> Kept:
    """A gradient that autograd has just made, before it is added or reduced."""
    return Kept("incoming gradient", _LARGEST, counts.largest, each, source, life="reducing")


def _widened(counts: Counts, sizes: ZeroSizes, source: str) -> Kept:
    """A rank's share of one reduced gradient, as it is added to those that are accumulated."""
    largest = largest_share(counts, sizes)
    return Kept("widened gradient", _LARGEST, largest, sizes.accumulate, source, life="reducing")


def _reduce_copy(counts: Counts, sizes: ZeroSizes, source: str) -> Kept:
    """The bucket, or one tensor that is larger, flattened for the collective."""
    elements = max(min(sizes.bucket, counts.trained), counts.largest)
    return Kept("copy to reduce", "gradients", elements, counts.element, source, life="reducing")
