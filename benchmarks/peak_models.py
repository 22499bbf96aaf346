"""What a published row's framework holds at its peak, priced with Plimsoll's own formulas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from peak_rows import Adapter, Row
from plimsoll.memory.items import Held, Moment
from plimsoll.memory.price.activation_form import (
    ActivationForm,
    AdapterForm,
    ChunkedHead,
    UnfusedHead,
)
from plimsoll.memory.price.activations import activation_items, backward_items
from plimsoll.memory.price.lifetimes import Life
from plimsoll.memory.price.norms import norm_copies
from plimsoll.memory.price.overheads import Constants
from plimsoll.memory.price.reduction import layers_left
from plimsoll.memory.price.states import Kept, kept_bytes
from plimsoll.memory.price.zero_states import Counts, ZeroSizes, zero_states
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape, parameter_tensors

_QUANTIZED = {"nf4": 0.5 + 4 / 64, "gptq": 0.5 + 2.5 / 128, "int8": 1.0, "none": 2.0}
"""Bytes of a linear's weight with its scales: NF4 in blocks of 64, GPTQ in groups of 128."""


@dataclass(frozen=True)
class Project:
    """What a project's code does where a row does not say it.

    deepspeed: strategy `single` still runs DeepSpeed ZeRO-2 where all weights are trained, or
    where they are quantised. bucket: elements of its DeepSpeed buckets. dropout: of adapters.
    routed_copies: bf16 copies of every routed row of a mixture of experts that its own code makes
    besides those of transformers, and as many more where experts have adapters.
    """

    deepspeed: bool = False
    bucket: int = 500_000_000
    dropout: bool = False
    routed_copies: tuple[int, int] = (0, 0)


PROJECTS = {
    # finetune.py, finetune/*.sh and ds_config_zero2.json
    "QwenLM/Qwen": Project(deepspeed=True, bucket=200_000_000, dropout=True),
    # trainer/models/layers/moe.py, after torchtitan: gathered, padded, permuted and unpermuted
    # rows, and an fp32 product with the scores; multi_moe.py: each adapter's result beside them
    "PrimeIntellect-ai/prime-rl": Project(routed_copies=(6, 2)),
}


@dataclass(frozen=True)
class Peak:
    """Bytes, in the row's own metric, and as the device shows them."""

    metric: float
    device: float


def in_metric(row: Row, allocated: float, constants: Constants) -> Peak:
    """From allocated bytes to what the row reports; an unstated metric is taken as the device's."""
    reserved = allocated * (1 + constants.allocator_gap)
    communicator = constants.nccl_communicator if row.ranks > 1 else 0
    device = reserved + constants.cuda_context + communicator
    by_metric = {"allocated": allocated, "reserved": reserved}
    return Peak(by_metric.get(row.metric, device), device)


def allocated_bytes(row: Row) -> int:
    """The maximum over forward and backward, the first reduction of gradients, their norm and the
    optimizer's step, as of a trained role (memory/price/lifetimes.py); but the DeepSpeed of these
    rows made its buckets before the backward (zero/stage_1_and_2.py, backward).
    """
    project = PROJECTS.get(row.source, Project())
    kept = tuple(_states(row, project))
    activations = _Activations(row, project)

    def living(*lives: Life) -> int:
        return kept_bytes(kept, "always", "built", "stepped", "training", *lives)

    return max(
        living("computing", "backward") + activations.highest,
        living("computing", "backward") + activations.left(row.shape.layers),
        living("computing", "backward", "reducing") + activations.left(_unreduced(row, project)),
        living("norming"),
        living("stepping"),
    )


def _unreduced(row: Row, project: Project) -> int:
    """Layers that are left when gradients are first reduced: FSDP and DDP begin with the last."""
    stage = _zero_stage(row, project)
    if not stage:
        return row.shape.layers
    sizes = ZeroSizes(stage, row.ranks, 2, project.bucket)
    return layers_left(row.shape, trained_parameters(row), sizes, row.adapter is not None)


def _states(row: Row, project: Project) -> Iterator[Kept]:
    if row.reference:
        ranks = row.ranks if row.strategy in ("zero3", "fsdp") else 1
        yield Kept("reference", "parameters", row.shape.parameters, 2, "", ranks)
    if stage := _zero_stage(row, project):
        yield from _zero(row, project, stage)
    elif row.strategy == "fsdp":
        yield from _fsdp(row)
    else:
        yield from _whole(row)


def _zero_stage(row: Row, project: Project) -> int:
    if row.strategy.startswith("zero"):
        return int(row.strategy[-1])
    full = row.adapter is None or row.quantization != "none"
    return 2 if project.deepspeed and full and row.strategy == "single" else 0


def _adapter_parameters(shape: ModelShape, adapter: Adapter) -> int:
    """Of one on every linear layer that is no expert."""
    everywhere = "all-linear" in adapter.targets
    chosen = [x for x in shape.linears if x.stacked == 1]
    chosen = [x for x in chosen if everywhere or x.name in adapter.targets]
    return adapter.rank * sum(x.count * (x.inputs + x.outputs) for x in chosen)


def _ends(shape: ModelShape) -> int:
    return shape.embedding_parameters + shape.head_parameters


def trained_parameters(row: Row) -> int:
    """Of the whole model, or of all adapters beside each other."""
    if row.adapter is None:
        return row.shape.parameters
    ends = _ends(row.shape) if row.adapter.ends else 0
    return row.adapter.together * _adapter_parameters(row.shape, row.adapter) + ends


def _base(row: Row, element: float, ends: float) -> float:
    """Bytes of all frozen weights of a model with an adapter."""
    linear = row.shape.linear_parameters
    rest = row.shape.parameters - linear
    if row.quantization == "none":
        return element * (linear + rest)
    return _QUANTIZED[row.quantization] * linear + ends * rest


def _zero(row: Row, project: Project, stage: int) -> Iterator[Kept]:
    """DeepSpeed with 16-bit gradients, as Trainer's integration sets it up."""
    shape, ranks = row.shape, row.ranks
    element = 4 if row.precision == "fp32" else 2
    tensors = [t for t in parameter_tensors(shape) if row.adapter is None]
    counts = Counts(
        trained=trained_parameters(row),
        frozen=0,
        largest=max((t.elements for t in tensors), default=0),
        element=element,
        moments=row.moments,
        oversized=sum(t.parameters for t in tensors if t.elements > project.bucket),
    )
    sizes = ZeroSizes(
        stage=stage,
        ranks=ranks,
        accumulate=element,
        bucket=2 * project.bucket,  # overlap_comm, which Trainer's examples turn on, has two
        prefetch=50_000_000,
        live=1_000_000_000,
        persistence=100_000,
        sub_group=1_000_000_000,
        offload=row.optimizer_offload,
        offload_weights=row.weight_offload and stage == 3,
    )
    made = (*zero_states(counts, sizes, "cuda"), *norm_copies(counts, sizes, tensors, "cuda"))
    yield from (one for one in made if one.where == "device")
    if row.adapter is not None:
        base = int(_base(row, element, element))
        yield Kept("base", "bytes", base, 1, "", ranks if stage == 3 else 1)
        if stage == 3 and ranks > 1:
            live = min(shape.parameters, max(sizes.live, shape.largest_parameter))
            yield _plain("live parameters", live, element, "computing")


def _fsdp(row: Row) -> Iterator[Kept]:
    """Weights divided, gathered block by block in 16 bits; embedding and head with the root."""
    shape, ranks, count = row.shape, row.ranks, trained_parameters(row)
    wide = 2 if row.precision == "pure" else 4
    frozen = 4 if row.precision in ("fp32", "fp32 weights") else 2
    base = int(_base(row, frozen, frozen)) if row.adapter else 0
    yield Kept("base", "bytes", base, 1, "", ranks)
    yield from _trained_states(row, count, wide, ranks)
    block = shape.linear_parameters // shape.layers
    root = _ends(shape)
    yield _plain("gathered root and two blocks", root + 2 * block, 2, "computing")
    if ranks > 1:  # made on a stream of its own, whose freed memory others cannot use
        yield _plain("gather buffer", max(root, block), 2, "computing")
    if row.adapter is None:
        yield _plain("gradients of a block, to reduce", block, 2 + 4, "backward")


def _whole(row: Row) -> Iterator[Kept]:
    """A copy on every rank. Autocast keeps fp32 weights, and casts of them until the backward's
    end; beside an adapter the base stays in 16 bits, and what is trained of it as it was."""
    adapter = row.adapter
    if adapter is None:
        wide = 2 if row.precision == "pure" else 4
        yield from _trained_states(row, trained_parameters(row), wide, 1)
        if row.precision == "mixed":
            yield _plain("autocast's copies", row.shape.parameters, 2, "computing")
    else:
        element = 4 if row.precision == "fp32" else 2
        yield Kept("base", "bytes", int(_base(row, element, 4)), 1, "")
        pairs = adapter.together * _adapter_parameters(row.shape, adapter)
        yield from _trained_states(row, pairs, 2 if row.precision == "pure" else 4, 1)
        if adapter.ends:
            yield from _trained_states(row, _ends(row.shape), element, 1)
    if row.strategy == "ddp" and row.ranks > 1:
        yield _plain("DDP's buckets", trained_parameters(row), 4, "training")


def _trained_states(row: Row, count: int, wide: int, ranks: int) -> Iterator[Kept]:
    """Weights, gradients and moments in one dtype; foreach AdamW makes one more copy."""
    yield Kept("weights", "trained", count, wide, "", ranks, life="built")
    kept = count if row.keeps_gradients else row.shape.largest_parameter
    yield Kept("gradients", "trained", kept, wide, "", ranks, life="training")
    moments = row.moments * wide / 4 if row.moments > 2 else row.moments
    yield Kept("moments", "trained", count, moments, "", ranks, life="stepped")
    if row.foreach and row.moments > 2:
        yield Kept("square roots", "trained", count, wide, "", ranks, life="stepping")


@dataclass(frozen=True)
class _Activations:
    """Of a row's micro-batch; bytes."""

    row: Row
    project: Project

    @property
    def highest(self) -> int:
        held = activation_items("actor", self.row.shape, self._work, self._form, "train_actor")
        return self._bytes(held)

    def left(self, layers: int) -> int:
        """Where the last of the first so many layers is undone."""
        at = Moment("train_actor", "backward")
        held = backward_items("actor", self.row.shape, self._work, self._form, at, layers)
        return self._bytes(held) if layers else 0

    def _bytes(self, held: Iterable[Held]) -> int:
        row = self.row
        found = sum(one.item.bytes for one in held if one.item.where == "device")
        plain, adapted = self.project.routed_copies
        copies = plain + (adapted if row.adapter else 0)
        return found + 2 * copies * row.tokens * row.shape.experts_per_token * row.shape.hidden

    @property
    def _work(self) -> MicroBatch:
        tokens, sequences = self.row.tokens, self.row.sequences
        return MicroBatch(tokens, sequences, tokens // sequences, tokens)

    @property
    def _form(self) -> ActivationForm:
        row, deepspeed = self.row, _zero_stage(self.row, self.project) > 0
        wide = row.strategy in ("single", "ddp") and not deepspeed and row.precision != "pure"
        pair = None
        if row.adapter is not None:
            element, dropout = 4 if wide else 2, self.project.dropout
            pair = AdapterForm(row.adapter.rank, row.adapter.targets, element, dropout)
        return ActivationForm(
            element=4 if row.precision == "fp32" else 2,
            checkpoint_every=1 if row.checkpointed else None,
            attention="eager" if row.eager else "varlen",
            head=ChunkedHead(row.chunk, entropy=True) if row.chunk else UnfusedHead(not deepspeed),
            trained=True,
            adapter=pair,
            quantized=row.quantization != "none",
            inputs_on_host=row.inputs_on_host,
        )


def _plain(name: str, elements: int, each: float, life: Life = "always") -> Kept:
    return Kept(name, "parameters", elements, each, "", life=life)
