"""The tensors that DeepSpeed ZeRO 0.19.8 keeps for one trained role on one rank, in our settings.

Read in its source, and checked against the tensors that its engines really hold
(tests/integration/test_engine_zero.py). It departs from the textbook's 16 bytes a parameter:

- stage 1 in bfloat16 keeps undivided fp32 gradients on every rank (runtime/bf16_optimizer.py);
- stage 2 with fp32 accumulation keeps its share of fp32 gradients on the device from the first
  backward to the step, also where the optimizer is offloaded (zero/stage_1_and_2.py,
  _build_compact_grad_partition_buffer);
- stage 3 keeps its share of accumulated gradients always, and copies one sub-group of it for the
  step (zero/stage3.py, _setup_for_real_optimizer, _prepare_fp32_grad_for_sub_group);
- stage 3 on one rank uses its weights where they lie and gathers nothing;
- stage 3 with states in bfloat16 copies the weights as masters (its _create_fp32_partitions).

Beside a role's states DeepSpeed has buffers: copies of gradients in fp64, made one at a time for
the gradient norm; a second copy of the weights; and copies that are made only on CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import ceil

from plimsoll.config.cluster import Device
from plimsoll.config.engine import OptimizerConfig
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Kind, Life, Tensors, Where
from plimsoll.trainer.zero.settings import (
    Counts,
    ZeroSizes,
    is_bf16_optimizer,
    is_compact,
    largest_share,
)

_STAGE12 = "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py"
_STAGE3 = "DeepSpeed 0.19.8, runtime/zero/stage3.py"
_BF16 = "DeepSpeed 0.19.8, runtime/bf16_optimizer.py"
_STAGE0 = "DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and runtime/engine.py"
_LARGEST = "of the largest tensor"
REDUCE_BUCKET = "reduce bucket"
"""The name of the buffer in which gradients are reduced; it holds nothing between steps."""
_AHEAD = 3
"""Buckets by which the host may be ahead of a stream: it waits if more than two are on their way,
then sends one (`max_param_reduce_events`, and in partitioned_param_coordinator.py
`max_ongoing_fetch_events`)."""
_ALLREDUCE = 500_000_000  # elements: DeepSpeedEngine.buffered_allreduce_fallback
_DOUBLE = 8
_WRITTEN_OUT = 5 * 4  # fp32: both moments, the scaled gradient, a square root and its quotient
_AT_ONCE = 250_000_000  # elements: zero/stage3.py, _constant_buffered_norm2
_SOURCE = "DeepSpeed 0.19.8, runtime/zero: get_grad_norm_direct and set_norm_for_param_grad_in_gpu"


def zero_states(counts: Counts, sizes: ZeroSizes, device: Device) -> tuple[Tensors, ...]:
    """Return all tensors of the role on one rank; on CPU all are in host memory.

    On CPU a bucket counts only the bytes that are written to it: the system gives pages at their
    first use.
    """
    if device == "cuda":
        return (*weights(counts, sizes), *_training_tensors(counts, sizes))
    touched = replace(sizes, bucket=min(sizes.bucket, counts.trained))
    tensors = (*weights(counts, touched), *_training_tensors(counts, touched))
    return tuple(replace(item, where="host", pinned=0) for item in tensors)


def weights(counts: Counts, sizes: ZeroSizes) -> Iterator[Tensors]:
    """Yield the weights: undivided, or the rank's share and buffers for gathered weights."""
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
        yield Tensors("weights", name, of, elements, each, source, ranks, where, pinned=block)
    name, of = "scales of 4-bit weights", "parameters in 4 bits"
    source = "QLoRA, arXiv 2305.14314, section 3: scales of blocks of 64, not divided by ZeRO"
    yield Tensors("weights", name, of, counts.quantized, counts.scales, source)
    if divided and (ranks > 1 or sizes.offload_weights):
        yield from _gathered_weights(counts, sizes)


def _gathered_weights(counts: Counts, sizes: ZeroSizes) -> Iterator[Tensors]:
    stage = _Stage(counts, sizes, "DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py")
    rest, each = counts.stored - counts.small, counts.element
    live = min(rest, max(sizes.live, counts.largest, counts.together) + counts.kept)
    small, name = counts.small, "small parameters kept whole"
    yield Tensors("weights", name, "of small tensors", small, each, stage.source)
    yield stage.buffer("live parameters", "gathered", live, each, "computing")
    buckets = 1 + _AHEAD if sizes.overlaps else 1
    ahead = min(buckets * sizes.prefetch, rest - live)
    yield stage.buffer("prefetch bucket", "on their way", ahead, each, "computing")


def _training_tensors(counts: Counts, sizes: ZeroSizes) -> Iterator[Tensors]:
    if not counts.trained:
        return
    if sizes.stage == 0:
        yield from _Stage(counts, sizes, _STAGE0).stage_0()
    elif sizes.stage == 3:
        yield from _Stage(counts, sizes, _STAGE3).stage_3()
    elif is_bf16_optimizer(counts, sizes):
        yield from _Stage(counts, sizes, _BF16).stage_1_bf16()
    else:
        yield from _Stage(counts, sizes, _STAGE12).stage_1_and_2()


@dataclass(frozen=True)
class _Stage:
    """The tensors that a stage of ZeRO keeps for a role.

    Attributes:
        source: The file of DeepSpeed that makes them.
    """

    counts: Counts
    sizes: ZeroSizes
    source: str

    def whole(self, kind: Kind, name: str, each: float, life: Life) -> Tensors:
        """Return tensors of every trained parameter, on every rank."""
        of, elements = "trained parameters", self.counts.trained
        return Tensors(kind, name, of, elements, each, self.source, life=life)

    def share(self, kind: Kind, name: str, each: float, life: Life) -> Tensors:
        """Return tensors of the rank's share of the trained parameters."""
        return replace(self.whole(kind, name, each, life), ranks=self.sizes.ranks)

    def on_host(self, kind: Kind, name: str, each: float, life: Life, block: int) -> Tensors:
        """Return a share in host memory; block: elements that are pinned together, if any are."""
        pinned = block if self.sizes.pinned else 0
        return replace(self.share(kind, name, each, life), where="host", pinned=pinned)

    def buffer(self, name: str, of: str, elements: int, each: float, life: Life) -> Tensors:
        return Tensors("buffers", name, of, elements, each, self.source, life=life)

    def stage_0(self) -> Iterator[Tensors]:
        each, moments = self.counts.element, self.counts.moments
        yield self.whole("gradients", "gradients", each, "training")
        if each == 4:
            yield self.whole("optimizer states", "moments", moments, "stepped")
            copied = min(self.counts.trained, _ALLREDUCE)
            yield self.buffer("copy to reduce", "gradients", copied, 4, "stepping")
            return
        yield self.whole("optimizer states", "fp32 masters", 4, "built")
        yield self.whole("optimizer states", "moments", moments, "built")
        yield self.whole("gradients", "fp32 gradients", 4, "stepping")
        yield self.whole("gradients", "gradients of a dry step", each + 4, "building")

    def stage_1_bf16(self) -> Iterator[Tensors]:
        yield self.share("optimizer states", "fp32 masters", 4, "built")
        yield self.whole("gradients", "fp32 gradients", 4, "built")
        yield self.share("optimizer states", "moments", self.counts.moments, "stepped")
        yield self.whole("gradients", "gradients", 2, "training")
        yield replace(self._incoming_gradient(4), life="backward")
        copied = min(self.counts.trained, _ALLREDUCE)
        yield self.buffer("copies to reduce", "gradients in fp32, bf16", copied, 6, "stepping")
        yield self.whole("buffers", "flat copy of weights", 2, "building")

    def stage_1_and_2(self) -> Iterator[Tensors]:
        sizes, each = self.sizes, self.sizes.accumulate
        yield from self._optimizer()
        if sizes.offload:
            yield from self._staging()
        if sizes.stage == 1:
            yield self.whole("gradients", "gradients", each, "training")
            yield self.buffer(REDUCE_BUCKET, "elements", sizes.bucket, each, "training")
            share = self.share("gradients", "share of gradients", each, "norming")
            yield share if sizes.offload else replace(share, each=sizes.master, life="stepping")
        else:
            yield from self._stage_2_gradients()
        yield self._reduce_copy()
        yield self._incoming_gradient(self.counts.element)
        yield self.whole("buffers", "flat copy of weights", self.counts.element, "building")

    def _stage_2_gradients(self) -> Iterator[Tensors]:
        counts, sizes, each = self.counts, self.sizes, self.counts.element
        yield self.buffer(REDUCE_BUCKET, "elements", sizes.bucket, each, "backward")
        oversized = self.share("gradients", "oversized gradients", each, "backward")
        of = "in tensors larger than a bucket"
        yield replace(oversized, of=of, elements=counts.oversized)
        if is_compact(counts, sizes):
            yield self.share("gradients", "fp32 gradients", 4, "training")
            if sizes.master < 4 and not sizes.offload:
                yield self.share("gradients", "narrowed gradients", sizes.master, "stepping")
            yield self._widened_gradient()
        elif sizes.offload and sizes.master < 4:
            return  # they are added up in the optimizer's gradients
        elif sizes.offload:
            block = -(-counts.largest // sizes.ranks)
            yield self.on_host("gradients", "gradients", each, "stepped", block)
        else:
            wide = each if each == sizes.master else each + sizes.master  # flattened, then widened
            yield self.share("gradients", "gradients", each, "training")
            yield self.share("gradients", "gradients of a micro-batch", each, "backward")
            yield self.share("gradients", "flat gradients", wide, "stepping")

    def stage_3(self) -> Iterator[Tensors]:
        sizes, element, each = self.sizes, self.counts.element, self.sizes.accumulate
        yield from self._optimizer()
        share, name = -(-self.counts.trained // sizes.ranks), "accumulated gradients"
        if sizes.offload:
            yield self.on_host("gradients", name, each, "built", share)
        else:
            yield self.share("gradients", name, each, "built")
            copied = min(share, sizes.sub_group)
            wide = sizes.master + (each if each != sizes.master else 0)  # flattened, then cast
            yield self.buffer("copy of a sub-group", "gradients", copied, wide, "stepping")
        yield self.buffer(REDUCE_BUCKET, "elements", sizes.bucket, element, "built")
        yield from self._overlapped() if sizes.overlaps else (self._reduce_copy(),)
        if each != element:
            yield self._widened_gradient()
        yield self._incoming_gradient(element)

    def _overlapped(self) -> Iterator[Tensors]:
        """Yield what reducing beside the backward pass holds, on a stream of its own.

        The allocator gives the memory of that stream to no other, so the copy stays. Gradients stay
        until that stream has copied them: the host may be as many buckets ahead as DeepSpeed lets
        it (`max_param_reduce_events`), and is filling one.
        """
        counts = self.counts
        waiting = min((1 + _AHEAD) * self.sizes.bucket, counts.trained)
        yield replace(self._reduce_copy(), life="training")
        yield self.buffer("gradients to reduce", "gradients", waiting, counts.element, "backward")

    def _optimizer(self) -> Iterator[Tensors]:
        """Yield masters and moments; offloaded, also the gradients that DeepSpeedCPUAdam reads.

        Stage 3 does not pin its masters.
        """
        sizes, moments = self.sizes, self.counts.moments
        each, dtype = sizes.master, "fp32" if sizes.master == 4 else "bf16"
        masters = f"{dtype} masters"
        if not sizes.offload:
            yield self.share("optimizer states", masters, each, "built")
            yield self.share("optimizer states", "moments", moments, "stepped")
            return
        share = -(-self.counts.trained // sizes.ranks)
        block = min(share, sizes.sub_group) if sizes.stage == 3 else share
        pinned = 0 if sizes.stage == 3 else block
        yield self.on_host("optimizer states", masters, each, "built", pinned)
        yield self.on_host("optimizer states", "moments", moments, "stepped", 0)
        name = f"{dtype} gradients of the optimizer"
        yield self.on_host("gradients", name, each, "built", block)

    def _staging(self) -> Iterator[Tensors]:
        """Yield the buffers of stages 1 and 2 with the optimizer on the host.

        They are updated weights on their way to the device, and two buffers of one gradient.
        """
        each, largest = self.counts.element, self.counts.largest
        share = -(-self.counts.trained // self.sizes.ranks)
        yield self.on_host("buffers", "staging buffer", each, "built", share)
        buffer = self.buffer("gradient buffer", _LARGEST, largest, each, "built")
        yield buffer
        yield replace(buffer, where="host", pinned=largest if self.sizes.pinned else 0)

    def _incoming_gradient(self, each: int) -> Tensors:
        """Return a gradient that autograd has just made, before it is added or reduced."""
        return self.buffer("incoming gradient", _LARGEST, self.counts.largest, each, "reducing")

    def _widened_gradient(self) -> Tensors:
        """Return a rank's share of one reduced gradient, as it is added to the accumulated ones."""
        largest, each = largest_share(self.counts, self.sizes), self.sizes.accumulate
        widened = self.buffer("widened gradient", _LARGEST, largest, each, "reducing")
        return replace(widened, kind="gradients")

    def _reduce_copy(self) -> Tensors:
        """Return the flat copy that is reduced: a bucket, or one tensor larger than a bucket."""
        counts = self.counts
        elements = max(min(self.sizes.bucket, counts.trained), counts.largest)
        return self.buffer("copy to reduce", "gradients", elements, counts.element, "reducing")


def norm_copies(counts: Counts, sizes: ZeroSizes, device: Device) -> Iterator[Tensors]:
    """Yield the copies of one gradient that are made for the norm, just before the step.

    Yield nothing at stage 0 and for BF16_Optimizer, which take the norm in fp32 without copies.
    """
    if not counts.trained or sizes.stage == 0 or is_bf16_optimizer(counts, sizes):
        return
    piece = largest_share(counts, sizes)
    if sizes.stage == 3 and sizes.offload:
        piece = min(piece, _AT_ONCE)
    copies = [_norm_tensors("norm of a gradient", piece, _DOUBLE)]
    name = "gradient from the host"  # offloaded gradients are copied one by one
    if sizes.offload and sizes.stage == 3 and device == "cuda":
        copies.append(_norm_tensors(name, largest_share(counts, sizes), sizes.accumulate))
    if sizes.offload and sizes.stage < 3 and not is_compact(counts, sizes):
        copies.append(_norm_tensors(name, counts.largest, counts.element))
    yield from copies if device == "cuda" else (replace(c, where="host") for c in copies)


def _norm_tensors(name: str, elements: int, each: int) -> Tensors:
    return Tensors("gradients", name, _LARGEST, elements, each, _SOURCE, life="norming")


def second_copy(counts: Counts, ranks: int) -> Tensors:
    """Return the second copy of the weights, made by ZeRO++'s hierarchical partitioning (hpZ).

    `ranks`: how many ranks share the copy. It exists from the first forward on, when weights are
    divided again after their first use (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py,
    _partition_param_sec).
    """
    name, of, size = "second copy of weights", "parameters", counts.stored
    source = "ZeRO++, arXiv 2306.10209, section 3.2"
    return Tensors("weights", name, of, size, counts.element, source, ranks, life="stepped")


def cpu_copies(counts: Counts, sizes: ZeroSizes, optimizer: OptimizerConfig) -> Iterator[Tensors]:
    """Yield copies that a rank makes on CPU only, while it trains and while its engine is built.

    GPU kernels and NCCL do without them.
    """
    trained, ranks, each = counts.trained, sizes.ranks, counts.element
    if sizes.stage in (1, 2) and not sizes.offload and not is_bf16_optimizer(counts, sizes):
        # They exist beside the flat copy of the weights: it is free by then, but the heap keeps it
        # for a second.
        name, of = "zeros for gradients", "trained parameters"
        source = "DeepSpeed 0.19.8, zero/stage_1_and_2.py: initialize_optimizer_states; measured: "
        source += "3M to 120M parameters, the flat copy still resident"
        zeros = Tensors("gradients", name, of, trained, sizes.master, source, ranks)
        yield replace(zeros, where="host", life="building")
    if optimizer.kind == "adamw_8bit":
        # The optimizer's largest tensor is a weight at stage 0, a sub-group of the rank's share at
        # stage 3, and the rank's share at other stages.
        elements = counts.largest if sizes.stage == 0 else -(-trained // ranks)
        if sizes.stage == 3:
            elements = min(elements, sizes.sub_group)
        name, of = "copies for 8-bit AdamW", "of the largest of the optimizer's tensors"
        source = "bitsandbytes, backends/cpu/ops.py: _optimizer_update_8bit_blockwise_cpu"
        copies = Tensors("buffers", name, of, elements, _WRITTEN_OUT, source)
        yield replace(copies, where="host", life="stepping")
    if sizes.stage == 3:
        elements = max(min(sizes.bucket, trained), counts.largest)
        source = "PyTorch, ProcessGroupGloo.cpp: reduce_scatter_tensor reduces a clone of its input"
        clone = Tensors("buffers", "gloo's copy to reduce", "gradients", elements, each, source)
        yield replace(clone, where="host", life="reducing")


BOTH_TABLES = ("embed_tokens", "lm_head")


def layers_left(
    shape: ModelShape, trained: int, sizes: ZeroSizes, whole: Collection[str] = BOTH_TABLES
) -> int:
    """Return how many layers' activations are still kept when DeepSpeed reduces for the first time.

    Gradients arrive from the head down, the embedding's last (a tied head's with it). If a bucket
    holds them all, they are reduced after the last of them, and no layers are left; stage 0 does
    so, too. `trained`: the number of elements of all gradients. `whole`: those of the embedding
    and the head that have gradients.
    """
    if sizes.stage == 0 or sizes.bucket >= trained:
        return 0
    head = shape.head_parameters if "lm_head" in whole else 0
    embedding = "embed_tokens" in whole or (shape.tied and "lm_head" in whole)
    layers = trained - head - (shape.embedding_parameters if embedding else 0)
    undone = min(1.0, max(0, sizes.bucket - head) / max(1, layers))
    return ceil(shape.layers * (1 - undone))
