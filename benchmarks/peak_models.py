"""What a published row's framework holds at its peak, priced with Plimsoll's own formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from peak_projects import PROJECTS, Project
from peak_rows import Row
from peak_states import bucket_sizes, states, trained_parameters, zero_stage
from plimsoll.memory.items import Held, Item, Moment
from plimsoll.memory.price.activation_form import (
    ActivationForm,
    AdapterForm,
    ChunkedHead,
    UnfusedHead,
)
from plimsoll.memory.price.activations import activation_items, backward_items
from plimsoll.memory.price.division import ZeroSizes
from plimsoll.memory.price.lifetimes import Life
from plimsoll.memory.price.overheads import Constants
from plimsoll.memory.price.reduction import layers_left
from plimsoll.memory.price.states import kept_bytes
from plimsoll.memory.shapes.shape import MicroBatch

_HUGGING_FACE = 16  # bytes of a logit where the loss is highest: as `UnfusedHead` counts


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
    if project.untied:
        row = replace(row, shape=replace(row.shape, tied=False))
    kept = tuple(states(row, project))
    activations = _Activations(row, project)

    def living(*lives: Life) -> int:
        return kept_bytes(kept, "always", "built", "stepped", *lives)

    before: tuple[Life, ...] = ("training",) if row.accumulates else ()
    return max(
        living("computing", "backward", *before) + activations.highest,
        living("computing", "backward", *before) + activations.left(row.shape.layers),
        living("computing", "backward", "reducing", *before)
        + activations.left(_unreduced(row, project)),
        living("computing", "backward", "training") + activations.at_end,
        living("training", "norming"),
        living("training", "stepping"),
    )


def _unreduced(row: Row, project: Project) -> int:
    """Layers that are left when gradients are first reduced: FSDP and DDP begin with the last."""
    stage = zero_stage(row, project)
    if not stage:
        return row.shape.layers
    sizes = ZeroSizes(stage, row.ranks, 2, bucket_sizes(row, project)[0])
    return layers_left(row.shape, trained_parameters(row), sizes, row.adapter is not None)


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
        return self._bytes(held) + self._held_logits if layers else 0

    @property
    def _held_logits(self) -> int:
        """Of the output, until the backward is done."""
        words = self.row.tokens * self.row.shape.vocabulary
        return self._form.element * words if self.project.holds_output else 0

    @property
    def at_end(self) -> int:
        """Where the first layer is undone."""
        row = self.row
        reentrant = self.project.reentrant if row.reentrant is None else row.reentrant
        kept = reentrant and row.strategy == "fsdp" and row.adapter is not None
        if not (kept and row.checkpointed):
            return self.left(1)
        stream = 2 * row.tokens * row.shape.hidden
        return self.left(row.shape.layers) + stream * row.shape.layers

    def _bytes(self, held: Iterable[Held]) -> int:
        found = sum(self._item_bytes(one.item) for one in held if one.item.where == "device")
        return found + self._routed + self._quantized_inputs - self._unsaved

    def _item_bytes(self, item: Item) -> int:
        if item.name == "logits":
            return item.bytes * self._logit // _HUGGING_FACE
        return item.bytes

    @property
    def _logit(self) -> int:
        """Bytes of each where the loss is highest. Of some at a time: logits and their gradients in
        16 bits, and between them a log-softmax in fp32 that no compiler leaves out. In place: fp32
        logits, and what the loss reads of them. Qwen's own code leaves fp32 to autocast, which
        DeepSpeed has not."""
        row = self.row
        if row.chunked_loss and row.compiled:
            return 4
        if row.loss_in_place:
            return self.project.in_place
        own = row.shape.family == "qwen"
        if row.chunked_loss or (own and zero_stage(row, self.project) > 0):
            return 8
        if own or row.prepared:
            return _HUGGING_FACE
        capped = row.shape.logits_softcapped  # the backward of tanh reads its result
        return self.project.logit + self._form.element * (self.project.holds_output + capped)

    @property
    def _routed(self) -> int:
        row = self.row
        plain, adapted = self.project.routed_copies
        copies = plain + (adapted if row.adapter else 0)
        return 2 * copies * row.tokens * row.shape.experts_per_token * row.shape.hidden

    @property
    def _quantized_inputs(self) -> int:
        """What queries, keys and values read, the output, the MLP's first and its last linears."""
        row, shape = self.row, self.row.shape
        if row.quantization == "none" or not self.project.quantized_inputs:
            return 0
        each = 2 * shape.hidden + shape.heads * shape.head_dim + shape.intermediate
        return 2 * row.tokens * each * self._whole_layers

    @property
    def _unsaved(self) -> int:
        """Three results of an activation that is written in six operations. Liger's norms save
        their input alone, not it in fp32 and normalised besides; its MLP no result of the SiLU."""
        row, shape = self.row, self.row.shape
        if row.fused_layers and not row.checkpointed:
            normed = 2 * shape.hidden
            if shape.traits.query_norms:
                normed += (shape.heads + shape.kv_heads) * shape.head_dim
            return (4 * normed + 2 * shape.intermediate) * row.tokens * shape.layers
        if shape.gated or not self.project.fused_gelu:
            return 0
        return 2 * 3 * row.tokens * shape.intermediate * self._whole_layers

    @property
    def _whole_layers(self) -> int:
        return 1 if self.row.checkpointed else self.row.shape.layers

    @property
    def _work(self) -> MicroBatch:
        tokens, sequences = self.row.tokens, self.row.sequences
        return MicroBatch(tokens, sequences, tokens // sequences, tokens)

    @property
    def _form(self) -> ActivationForm:
        row, deepspeed = self.row, zero_stage(self.row, self.project) > 0
        # Embeddings in fp32 make the residual stream so, and each linear's result is as its input.
        wide_stream = row.prepared and row.shape.family != "qwen"
        wide = row.strategy in ("single", "ddp") and not deepspeed and row.wide_adapter
        pair = None
        if row.adapter is not None:
            dropout = self.project.dropout if row.dropout is None else row.dropout
            pair = AdapterForm(row.adapter.rank, row.adapter.targets, 4 if wide else 2, dropout)
        return ActivationForm(
            element=4 if row.precision == "fp32" or wide_stream else 2,
            checkpoint_every=1 if row.checkpointed else None,
            attention="eager" if row.eager else "varlen",
            head=ChunkedHead(row.chunk, entropy=True) if row.chunk else UnfusedHead(),
            trained=True,
            adapter=pair,
            quantized=row.quantization != "none",
            inputs_on_host=row.inputs_on_host,
        )
