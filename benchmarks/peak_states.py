"""Weights, gradients and states of a published row's framework."""

from __future__ import annotations

from collections.abc import Iterator

from peak_colossal import low_level_zero
from peak_projects import Project
from peak_rows import Adapter, Row
from plimsoll.engine.zero.price import norm_copies
from plimsoll.engine.zero.sizes import Counts, ZeroSizes
from plimsoll.engine.zero.states import zero_states
from plimsoll.shapes.shape import ModelShape, parameter_tensors
from plimsoll.timeline.lifetimes import Life
from plimsoll.timeline.tensors import Kept

_QUANTIZED = {
    "nf4": 0.5 + 4 / 64,
    "nf4 twice": 0.5 + 1 / 64 + 4 / (64 * 256),
    "gptq": 0.5 + 2.5 / 128,
    "gptq 8": 1 + 3 / 128,
    "int8": 1.0,
    "none": 2.0,
}
"""Bytes of a linear's weight with its scales: NF4 in blocks of 64, whose scales may be quantised
again in blocks of 256; GPTQ in groups of 128."""


def states(row: Row, project: Project) -> Iterator[Kept]:
    """All that one rank keeps on its device beside activations."""
    if row.reference:
        ranks = row.ranks if row.strategy in ("zero3", "fsdp") else 1
        yield Kept("weights", "reference", "parameters", row.shape.parameters, 2, "", ranks)
    stage = zero_stage(row, project)
    if project.low_level_zero and stage in (1, 2):
        base = int(_base(row, 2, 2)) if row.adapter else 0
        yield from low_level_zero(row, trained_parameters(row), base, project.bucket)
    elif stage:
        yield from _zero(row, project, stage)
    elif row.strategy == "fsdp":
        yield from _fsdp(row, project)
    else:
        yield from _whole(row, project)


def zero_stage(row: Row, project: Project) -> int:
    """0 where it is not DeepSpeed."""
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
    bucket, prefetch, persistence = bucket_sizes(row, project)
    element = 4 if row.precision == "fp32" else 2
    tensors = [t for t in parameter_tensors(shape) if row.adapter is None]
    counts = Counts(
        trained=trained_parameters(row),
        frozen=0,
        largest=max((t.elements for t in tensors), default=0),
        element=element,
        moments=row.moments,
        oversized=sum(t.parameters for t in tensors if t.elements > bucket),
    )
    sizes = ZeroSizes(
        stage=stage,
        ranks=ranks,
        accumulate=element,
        bucket=2 * bucket,  # overlap_comm, which Trainer's examples turn on, has two
        prefetch=prefetch,
        live=1_000_000_000,
        persistence=persistence,
        sub_group=1_000_000_000,
        offload=row.optimizer_offload,
        offload_weights=row.weight_offload and stage == 3,
    )
    made = (*zero_states(counts, sizes, "cuda"), *norm_copies(counts, sizes, "cuda"))
    yield from (one for one in made if one.where == "device")
    if row.adapter is not None:
        base = int(_base(row, element, element))
        yield Kept("weights", "base", "bytes", base, 1, "", ranks if stage == 3 else 1)
        if stage == 3 and ranks > 1:
            live = min(shape.parameters, max(sizes.live, shape.largest_parameter))
            yield _plain("live parameters", live, element, "computing")


def bucket_sizes(row: Row, project: Project) -> tuple[int, int, int]:
    """Elements that are reduced and fetched at once, and of the largest that is kept whole
    (transformers/integrations/deepspeed.py, trainer_config_finalize)."""
    if row.auto_buckets or (project.auto_buckets and zero_stage(row, project) == 3):
        square = row.shape.hidden**2
        return square, int(0.9 * square), 10 * row.shape.hidden
    return row.bucket or project.bucket, 50_000_000, 100_000


def _fsdp(row: Row, project: Project) -> Iterator[Kept]:
    """Weights divided, gathered block by block in 16 bits or quantised; embedding and head with the
    root. Kept gathered, all blocks are there at the loss. Offloaded, all that is divided is on the
    host."""
    shape, ranks, count = row.shape, row.ranks, trained_parameters(row)
    wide = 2 if row.precision == "pure" else 4
    frozen = 4 if row.precision in ("fp32", "fp32 weights") else 2
    base = int(_base(row, frozen, frozen)) if row.adapter else 0
    if not row.weight_offload:
        yield Kept("weights", "base", "bytes", base, 1, "", ranks)
        yield from _trained_states(row, count, wide, ranks)
    gathered = 4 if row.autocast else 2  # as they are: in fp32
    if row.one_unit:
        yield from _one_unit(row, gathered, wide)
        return
    linears = shape.linear_parameters / shape.layers
    block = int(_QUANTIZED[row.quantization] * linears) * gathered // 2
    root = gathered * _ends(shape)
    blocks = shape.layers if row.kept_gathered else 2
    yield _plain("gathered root and blocks", root + blocks * block, 1, "computing")
    if ranks > 1 and row.metric != "allocated":  # on a stream whose freed memory others cannot use
        yield _plain("gather buffer", max(root, block), 1, "computing")
    if row.adapter is None:
        yield _plain("gradients of a block, to reduce", block // gathered, 2 + wide, "backward")
    if project.flat_gradients and row.accumulates:
        yield _plain("gradients of flat parameters", shape.parameters, wide, "training")


def _one_unit(row: Row, gathered: int, wide: int) -> Iterator[Kept]:
    """All weights, which the root keeps from forward to backward. Their gradients become one when
    the last of them is there (torch/distributed/fsdp/_flat_param.py: a split of the flat parameter,
    whose backward joins them), and that is reduced. No place that activations left free takes a
    block as large, so that what is reserved has it beside the most of them."""
    yield _plain("gathered weights", row.shape.parameters, gathered, "computing")
    if row.adapter is None:
        yield _plain("gradients, to join", row.shape.parameters, gathered, "reducing")
        joined: Life = "reducing" if row.metric == "allocated" else "backward"
        yield _plain("joined gradients", row.shape.parameters, wide, joined)


def _whole(row: Row, project: Project) -> Iterator[Kept]:
    """A copy on every rank. Autocast keeps fp32 weights, and casts of them until the backward's
    end, or if they are frozen until their layer's; beside an adapter the base is in 16 bits, if
    nothing else is said, and what is trained of it as it was."""
    adapter, shape = row.adapter, row.shape
    if adapter is None:
        wide = 2 if row.precision == "pure" else 4
        yield from _trained_states(row, trained_parameters(row), wide, 1)
        if row.autocast:
            yield _plain("autocast's copies", shape.parameters, 2, "computing")
    else:
        element = 4 if row.precision in ("fp32", "fp32 weights") else 2
        if row.autocast:
            block = shape.linear_parameters // (shape.layers if row.checkpointed else 1)
            yield _plain("autocast's copies", block, 2, "computing")
        yield Kept(
            "weights", "base", "bytes", int(_base(row, element, 4 if row.prepared else 2)), 1, ""
        )
        pairs = adapter.together * _adapter_parameters(shape, adapter)
        wide = 4 if row.wide_adapter else 2
        yield from _trained_states(row, pairs, wide, 1)
        if project.reference_adapter:
            yield _plain("reference adapter", pairs, wide)
        if adapter.ends:
            yield from _trained_states(row, _ends(shape), element, 1)
    if row.strategy == "ddp" and row.ranks > 1:
        bucketed = wide if adapter is None else 4
        yield _plain("DDP's buckets", trained_parameters(row), bucketed, "training")


def _trained_states(row: Row, count: int, wide: int, ranks: int) -> Iterator[Kept]:
    """Weights, gradients and moments in one dtype; foreach AdamW makes one more copy."""
    yield Kept("weights", "weights", "trained", count, wide, "", ranks, life="built")
    kept = count if row.keeps_gradients else row.shape.largest_parameter
    yield Kept("gradients", "gradients", "trained", kept, wide, "", ranks, life="training")
    moments = row.moments * wide / 4 if row.moments > 2 else row.moments
    yield Kept("optimizer states", "moments", "trained", count, moments, "", ranks, life="stepped")
    if row.foreach and row.moments > 2:
        yield Kept("weights", "square roots", "trained", count, wide, "", ranks, life="stepping")


def _plain(name: str, elements: int, each: float, life: Life = "always") -> Kept:
    return Kept("weights", name, "parameters", elements, each, "", life=life)
