"""What a published row's framework holds of a micro-batch, priced with Plimsoll's own formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peak_projects import Project
from peak_rows import Row
from peak_states import zero_stage
from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.model.price.form import (
    ActivationForm,
    AdapterForm,
    ChunkedHead,
    UnfusedHead,
)
from plimsoll.shapes.shape import MicroBatch
from plimsoll.timeline.items import Held, Item, Moment

_HUGGING_FACE = 16  # bytes of a logit where the loss is highest: as `UnfusedHead` counts
_PASSING = ("recomputed activations", "working set", "logits", "logits chunk")
"""Not held from a layer's end to the loss."""


@dataclass(frozen=True)
class Activations:
    """Of a row's micro-batch; bytes."""

    row: Row
    project: Project

    @property
    def highest(self) -> int:
        held = activation_items("actor", self.row.shape, self._work, self._form, "train_actor")
        at_loss = any(one.item.name == "logits" for one in held)
        beside = self._cache if at_loss else 0
        layers = self.row.shape.layers
        beside += self._widened(layers) + self._parts(layers)
        highest = self._bytes(held) + beside - self._dropped(layers)
        kept = tuple(one for one in held if one.item.name not in _PASSING)
        return max(highest, self._bytes(kept) + self._head_copies)

    @property
    def _head_copies(self) -> int:
        """And the logits of a chunk that are made of them. Liger's loss leaves a head in fp32 to
        torch.autocast, which casts what is frozen anew for each chunk."""
        row, shape, chunk = self.row, self.row.shape, self.row.chunk or 0
        autocast = row.precision == "mixed" and not zero_stage(row, self.project)
        cast = 2 if chunk and row.prepared and autocast else 0
        each = 6 if row.head_copies else cast
        return (each * shape.hidden + 2 * chunk) * shape.vocabulary if each else 0

    def left(self, layers: int) -> int:
        """Where the last of the first so many layers is undone."""
        at = Moment("train_actor", "backward")
        held = backward_items("actor", self.row.shape, self._work, self._form, at, layers)
        if not layers:
            return 0
        beside = self.held + self._widened(layers) + self._parts(layers - 1)
        return self._bytes(held) + beside - self._dropped(layers - 1)

    @property
    def held(self) -> int:
        """The model's output, until the backward is done."""
        logits = self._output * self.row.tokens * self.row.shape.vocabulary
        return logits + self._cache if logits else 0

    @property
    def at_step(self) -> int:
        return self.held if self.project.output_at_step else 0

    @property
    def _output(self) -> int:
        """Bytes of each logit that is held: none where the loss makes them of a fused head."""
        if self.row.chunk:
            return 0
        said = self.row.holds_output
        holds = self.project.holds_output if said is None else said
        each = 4 if self.project.wide_output else self._form.element
        computed = 2 if self.row.kto else 1  # KTO's estimate of the divergence has its own
        return holds * each * computed * (2 if self.row.reference else 1)

    @property
    def _cache(self) -> int:
        """Keys and values of all layers, which attention does not save where they are computed
        again."""
        shape = self.row.shape
        each = 2 * self._form.element * shape.kv_heads * shape.head_dim * shape.layers
        return each * self.row.tokens if self.project.cached and self.row.checkpointed else 0

    def _widened(self, layers: int) -> int:
        """Checkpoints of what fp32 embeddings and 16-bit results add up to."""
        wide = self.row.autocast and not zero_stage(self.row, self.project)
        stream = 2 * self.row.tokens * self.row.shape.hidden
        return stream * layers if wide and self.row.checkpointed else 0

    def _parts(self, layers: int) -> int:
        """What attention, the second norm and the MLP read, where each is checkpointed alone."""
        parted = self.project.in_parts and self.row.checkpointed
        return 3 * self._form.element * self.row.tokens * self.row.shape.hidden * layers * parted

    def _dropped(self, layers: int) -> int:
        """Every other product, which is computed again: those of keys, of the output and up."""
        shape, dropped = self.row.shape, ("k_proj", "o_proj", "up_proj")
        widths = (x.outputs * x.count // shape.layers for x in shape.linears if x.name in dropped)
        return self._form.element * self.row.tokens * sum(widths) * layers * self.row.selective

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
        return (
            found
            + self._routed
            + self._quantized_inputs
            + self._packed
            + self._math
            - self._unsaved
        )

    def _item_bytes(self, item: Item) -> int:
        if item.name == "logits":
            return int(item.bytes * self._scored * self._logit / _HUGGING_FACE)
        if item.name == "recomputed activations" and self.project.in_parts:
            return min(item.bytes, self._mlp)
        return item.bytes

    @property
    def _scored(self) -> float:
        """Share of the tokens that have logits."""
        row = self.row
        return 1 if row.completion is None else row.completion * row.sequences / row.tokens

    @property
    def _mlp(self) -> int:
        """What an MLP keeps, the largest part of a layer: Liger's not the result of its SiLU."""
        kept = 4 - self._fused if self.row.shape.gated else 2
        return self._form.element * kept * self.row.tokens * self.row.shape.intermediate

    @property
    def _fused(self) -> bool:
        """Whether norms and MLPs are Liger's."""
        said = self.row.fused_layers
        return self.project.liger if said is None else said

    @property
    def _logit(self) -> float:
        """Bytes of each where the loss is highest. Of some at a time: logits and their gradients in
        16 bits, and between them a log-softmax in fp32 that no compiler leaves out; one does, and
        torchtune's loop drops its logits, so that one chunk of eight alone has both. In place: fp32
        logits, and what the loss reads of them. Qwen's own code leaves fp32 to autocast, which
        DeepSpeed has not."""
        row = self.row
        if row.completion is not None:
            return _HUGGING_FACE  # TRL's too: fp32 logits that it divides by a temperature
        if row.chunked_loss and row.compiled:
            return 2 + 2 / 8
        if row.loss_in_place:
            return self.project.in_place
        own = row.shape.family == "qwen"
        if row.chunked_loss or (own and zero_stage(row, self.project) > 0):
            return 8
        if own or (row.prepared and not row.uncast):
            return _HUGGING_FACE
        capped = row.shape.logits_softcapped  # the backward of tanh reads its result
        return self.project.logit + self._output + self._form.element * capped

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
    def _packed(self) -> int:
        """Queries and keys are copied as they are rotated, so that values keep theirs as well; keys
        and values of groups are copied for all heads."""
        row, shape = self.row, self.row.shape
        grouped = shape.kv_heads < shape.heads
        more = 2 * (shape.heads - shape.kv_heads if grouped else shape.heads) * shape.head_dim
        return 2 * row.tokens * more * self._whole_layers * self.project.packed_qkv

    @property
    def _math(self) -> int:
        """Of attention without a kernel (aten/src/ATen/native/transformers/attention.cpp,
        _scaled_dot_product_attention_math): its probabilities, and queries, keys and values of all
        heads, in fp32 instead of 16 bits; one layer's backward has two gradients of the former."""
        row, shape = self.row, self.row.shape
        narrow = 4 if row.precision == "fp32" else 2
        saved = 4 * 3 * shape.heads - narrow * (shape.heads + 2 * shape.kv_heads)
        scores = shape.heads * row.tokens**2 // row.sequences
        probabilities = scores * (4 * self._whole_layers + 8 * row.checkpointed)
        heads = saved * shape.head_dim * row.tokens * self._whole_layers
        return (probabilities + heads) * row.math

    @property
    def _unsaved(self) -> int:
        """Three results of an activation that is written in six operations. Liger's norms, and
        those of a compiler that computes again what is cheap, save their input alone, not it in
        fp32 and, to train them, normalised besides; their MLPs no result of the SiLU."""
        row, shape = self.row, self.row.shape
        if (self._fused or row.compiled) and not row.checkpointed:
            normed = 2 * shape.hidden
            if shape.traits.query_norms:
                normed += (shape.heads + shape.kv_heads) * shape.head_dim
            each = 2 if row.adapter else 4
            return (each * normed + 2 * shape.intermediate) * row.tokens * shape.layers
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
            selective=row.selective,
        )
