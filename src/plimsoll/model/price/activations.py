"""Predict the memory of one micro-batch, without weights: saved tensors, working sets and logits.

With gradient checkpointing, layers keep their inputs; with selective checkpointing they also keep
the results of products. A forward and backward may have its peak at three points: at the head, when
all layers have saved their tensors and no backward has freed any; in the last layer's backward;
and, if the embedding is trained, at the end, where its gradient is made. The highest point counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from plimsoll.model.price.form import (
    BLOCK_ELEMENTS,
    ActivationForm,
    ChunkedHead,
    NoHead,
    ScalarHead,
    TeacherHead,
    UnfusedHead,
)
from plimsoll.model.price.layer import (
    DOWN,
    FP32,
    GATES,
    OUTPUT,
    SOURCE,
    UPS,
    Layer,
    LayerStep,
    saved_bytes,
    summit,
)
from plimsoll.model.price.layer_steps import (
    final_norm,
    layer_steps,
    recomputed_steps,
    scoring_summit,
)
from plimsoll.resolve.run_spec import Phase
from plimsoll.shapes.shape import Linear, MicroBatch, ModelShape
from plimsoll.timeline.items import Allocation, Item, Kind, Moment, Where, pinned_block

_OF_MLP = {*GATES, *UPS, *DOWN} - {*OUTPUT}
_LOG_SUM_EXP = 4  # bytes for each token and head


def _product(*factors: tuple[int, str]) -> tuple[int, str]:
    """Return the product of numbers, and its formula in words; each factor is (number, unit)."""
    return prod(number for number, _ in factors), " x ".join(f"{n:,}{of}" for n, of in factors)


def _stream(layer: Layer) -> tuple[int, str]:
    """Return the bytes of the hidden states of all tokens (or their gradient), and the formula."""
    each = (layer.element, " bytes")
    return _product(each, (layer.tokens, " tokens"), (layer.shape.hidden, ""))


def _kept_products(layer: Layer) -> tuple[int, int, int]:
    """Return three sizes in bytes of what selective checkpointing keeps beside a layer's input.

    They are the results of the layer's linears, the attention's output, and the result of the last
    linear, which the backward pass neither reads nor recomputes. The products of experts and of
    narrow inputs are recomputed, and so are attention that holds its scores and MLPs in tiles.
    """
    element, shape, form = layer.element, layer.shape, layer.form
    attention = layer.tokens * shape.heads * (element * shape.value_dim + _LOG_SUM_EXP)
    unkept = shape.softcapped or form.attention == "eager" or layer.writes_scores
    thin = shape.hidden // 2
    tiled = form.mlp_tile is not None
    plain = (
        linear
        for linear in shape.linears
        if linear.stacked == 1 and linear.inputs >= thin and not (tiled and linear.name in _OF_MLP)
    )
    linears = sum(_width(layer, linear) * linear.count // shape.layers for linear in plain)
    last = 0 if shape.experts or tiled else element * layer.hidden
    return layer.tokens * linears, 0 if unkept else attention, last


def _width(layer: Layer, linear: Linear) -> int:
    """Return the bytes per token of the results of a linear layer and of its adapter's matrices."""
    adapter, element = layer.form.adapter, layer.element
    if adapter is None or not layer.form.adapts(linear.name):
        return element * linear.outputs
    again = adapter.dora and adapter.dropout  # on the dropped-out input
    thin = adapter.rank < layer.shape.hidden // 2  # then its second matrix is computed again
    matrices = adapter.element * (adapter.rank + (0 if thin else linear.outputs))
    return element * linear.outputs * (1 + again) + matrices


_KEPT = 1024
"""The size of each cache: a search makes hundreds of plans, in which few micro-batches differ."""
_INT64 = 8
_TAUGHT_BLOCKS = 8  # fp32, of student, teacher and divergence: at most, by the heads' test


@lru_cache(_KEPT)
def activation_items(
    role: str, shape: ModelShape, work: MicroBatch, form: ActivationForm, phase: Phase
) -> tuple[Allocation, ...]:
    """Return the tensors that exist at the peak of a phase's largest forward (and backward).

    Their moment is `forward_backward` if the form is trained, else `forward`.
    """
    moment = Moment(phase, "forward_backward" if form.trained else "forward")
    heights = _Heights(role, Layer(shape, work, form))
    return _allocations(moment, (heights.masks(), *heights.highest()))


@lru_cache(_KEPT)
def backward_items(
    role: str, shape: ModelShape, work: MicroBatch, form: ActivationForm, at: Moment, left: int
) -> tuple[Allocation, ...]:
    """Return the tensors that exist in the backward pass while `left` layers are left to do."""
    if left == 0:
        return ()
    lower = _Heights(role, Layer(_lower(shape, left), work, form))
    masks = _Heights(role, Layer(shape, work, form)).masks()
    return _allocations(at, (masks, *lower.at_layer()))


def _allocations(moment: Moment, items: tuple[Item, ...]) -> tuple[Allocation, ...]:
    return tuple(Allocation(item, frozenset({moment})) for item in items if item.bytes)


def _lower(shape: ModelShape, layers: int) -> ModelShape:
    def share(count: int) -> int:
        return count * layers // shape.layers

    return replace(
        shape,
        layers=layers,
        sliding_layers=share(shape.sliding_layers),
        linears=tuple(replace(linear, count=share(linear.count)) for linear in shape.linears),
    )


@dataclass(frozen=True)
class _Heights:
    """The points of one micro-batch that may be its peak; each method lists tensors that exist."""

    role: str
    layer: Layer

    def _item(
        self,
        name: str,
        size: int,
        formula: str,
        source: str = SOURCE,
        where: Where = "device",
        kind: Kind = "activations",
    ) -> Item:
        return Item(self.role, kind, name, where, "allocated", size, formula, source)

    def masks(self) -> Item:
        """Return the attention masks, which exist at every point."""
        tokens, longest = self.layer.tokens, self.layer.work.longest
        words = f"masks of {tokens:,} queries x {longest:,} keys, for all layers"
        return self._item(
            "attention masks", self.layer.attending.mask_bytes, words, "model/attention.py"
        )

    def highest(self) -> tuple[Item, ...]:
        """Return the tensors at the highest point, without the masks."""
        if self.layer.form.trained:
            heights = (self._at_head(), self.at_layer(), self._at_embedding())
            return max(heights, key=_device_bytes)
        top = scoring_summit(self.layer)
        working = self._item("working set", top.bytes, f"{top.bytes:,} bytes in {top.where}")
        positions = self._positions()
        return max((positions, working), (positions, *self._head()), key=_device_bytes)

    def _at_head(self) -> tuple[Item, ...]:
        last, steps = final_norm(self.layer).saved, layer_steps(self.layer)
        words = f"{last:,} of the last norm"
        whole = self._whole
        if whole:
            words = f"{self._saved_words(whole, steps)} + {words}"
        kept = self._item("activations", whole * saved_bytes(steps) + last, words)
        return (self._positions(), *self._of_checkpoints(undoing=False), kept, *self._head())

    def at_layer(self) -> tuple[Item, ...]:
        """Return the tensors in the backward pass of the last layer.

        If the last layer keeps everything, the backward of a checkpointed layer is not higher,
        because it has the same tensors below.
        """
        steps, again = layer_steps(self.layer), self._last_is_checkpointed
        top = summit(recomputed_steps(self.layer) if again else steps)
        others = self._whole if again else self._whole - 1
        saved = self._item(
            "recomputed activations" if again else "activations",
            others * saved_bytes(steps) + top.saved,
            f"{self._saved_words(others, steps)} + {top.saved:,} of the last layer",
        )
        stream, words = _stream(self.layer)
        words = f"{top.scratch:,} bytes in {top.where} + {words}"
        working = self._item("working set", top.scratch + stream, words)
        tied = self._tied and self.layer.form.trains("embed_tokens", tied=True)
        waiting = self._tables(int(tied), "held for the tied embedding")
        words = f"{top.gradient:,} bytes of a weight"
        flight = self._item("gradients in flight", top.gradient, words, kind="gradients")
        kept = self._of_checkpoints(undoing=True)
        return (self._positions(), *kept, saved, working, flight, waiting)

    @property
    def _checkpointed(self) -> int:
        every = self.layer.form.checkpoint_every
        return 0 if every is None else ceil(self.layer.shape.layers / every)

    @property
    def _whole(self) -> int:
        """The number of layers that keep everything."""
        return self.layer.shape.layers - self._checkpointed

    @property
    def _last_is_checkpointed(self) -> bool:
        every = self.layer.form.checkpoint_every
        return every is not None and (self.layer.shape.layers - 1) % every == 0

    def _of_checkpoints(self, undoing: bool) -> tuple[Item, ...]:
        """Return the tensors that checkpointed layers keep.

        If `undoing` is set, the point is in the last layer's backward.
        """
        again = undoing and self._last_is_checkpointed
        return (*self._inputs(), *(self._products(again) if self.layer.form.selective else ()))

    def _inputs(self) -> tuple[Item, ...]:
        stream, words = _stream(self.layer)
        all_words = f"{self._checkpointed} checkpoints x {words}"
        source = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
        if not self.layer.form.inputs_on_host:
            return (self._item("layer inputs", self._checkpointed * stream, all_words, source),)
        on_host = self._checkpointed * pinned_block(stream)
        two = min(2, self._checkpointed)  # one is in use, one is being copied
        all_words += ", pinned blocks rounded up to powers of two"
        return (
            self._item("layer inputs", two * stream, f"{two} x {words}", source),
            self._item("layer inputs", on_host, all_words, source, "host"),
        )

    def _products(self, again: bool) -> tuple[Item, ...]:
        """Return the kept products of the checkpointed layers.

        If `again` is set, those of the last layer are in use and are left out, except its last
        product, which nothing reads.
        """
        linears, attention, last = _kept_products(self.layer)
        layers, last = self._checkpointed - again, again * last
        tokens = self.layer.tokens
        words = (
            f"{layers} layers x {tokens:,} tokens x (linears {linears // tokens:,}, attention "
            f"{attention // tokens:,}) bytes + {last:,} of the last linear"
        )
        kept = layers * (linears + attention) + last
        return (self._item("kept activations", kept, words, "model/checkpointing.py"),)

    def _at_embedding(self) -> tuple[Item, ...]:
        """Return the tensors at the end, where autograd sums the embedding's gradients.

        A tied head's gradient is added to the embedding's into a third tensor.
        """
        if not self.layer.form.trains("embed_tokens", self.layer.shape.tied):
            return ()
        if self._tied:
            return (self._tables(3, "of the tied embedding, at the end"),)
        stream = self._item("working set", *_stream(self.layer))
        return (stream, self._tables(1, "of the embedding, at the end"))

    @property
    def _tied(self) -> bool:
        return self.layer.shape.tied and not isinstance(self.layer.form.head, ScalarHead)

    def _saved_words(self, count: int, steps: tuple[LayerStep, ...]) -> str:
        parts: dict[str, int] = {}
        for step in steps:
            parts[step.part] = parts.get(step.part, 0) + step.saved
        each = ", ".join(
            f"{part} {saved / self.layer.tokens:,.0f}" for part, saved in parts.items() if saved
        )
        return f"{count} layers x {self.layer.tokens:,} tokens x ({each}) bytes"

    def _positions(self) -> Item:
        tokens, element = self.layer.tokens, self.layer.element
        shape = self.layer.shape
        rotated = shape.latent.rotary if shape.latent else shape.head_dim
        wide = 2 * shape.traits.rotary_tables * element * rotated
        numbers = 2 * _INT64 * (tokens + self.layer.work.loss_tokens)
        words = f"{tokens:,} tokens x {wide:,} bytes + {numbers:,} of token ids and positions"
        return self._item("input ids and rotary tables", tokens * wide + numbers, words)

    def _tables(self, count: int, what: str) -> Item:
        """Return `count` gradients as large as the embedding."""
        shape = self.layer.shape
        table = (self.layer.element, " bytes"), (shape.vocabulary, ""), (shape.hidden, f" {what}")
        tables = _product((count, ""), *table)
        return self._item("embedding gradients in flight", *tables, kind="gradients")

    def _head(self) -> tuple[Item, ...]:
        """Return the head's tensors, from the last hidden states to the loss, with gradients."""
        layer, loss_tokens = self.layer, self.layer.work.loss_tokens
        inputs = self._head_inputs(loss_tokens, layer.element)
        learned = layer.form.trains("lm_head", layer.shape.tied)
        gradient = self._tables(int(learned), "of the head")
        match layer.form.head:
            case ChunkedHead() as head:
                return (inputs, self._chunk(head), gradient)
            case UnfusedHead():
                inputs = self._head_inputs(layer.tokens, layer.element)
                return (inputs, self._all_logits(), gradient)
            case TeacherHead() as head:
                return (inputs, *self._distillation(head), gradient)
            case ScalarHead():
                return (self._head_inputs(loss_tokens, FP32),)
            case NoHead():
                return (inputs,)

    def _head_inputs(self, rows: int, element: int) -> Item:
        both, hidden = 2 if self.layer.form.trained else 1, self.layer.shape.hidden
        each = (element, " bytes"), (rows, " tokens"), (hidden, "")
        return self._item("head inputs", *_product((both, ""), *each))

    def _chunk(self, head: ChunkedHead) -> Item:
        blocks = 2 + head.entropy + 2 * self.layer.shape.logits_softcapped + head.scaled
        logits, words = self._logits(head.rows, "rows", self.layer.element, blocks)
        return self._item("logits chunk", logits, words, "model/token_logprobs.py")

    def _distillation(self, head: TeacherHead) -> tuple[Item, Item]:
        """Return the chunks of student's and teacher's logits, and the teacher's head inputs."""
        element, blocks = head.element, _TAUGHT_BLOCKS + self.layer.shape.logits_softcapped
        both = self.layer.element + element
        logits, words = self._logits(head.rows, "rows of both", both, blocks)
        source, tokens = "model/distillation.py", (self.layer.work.loss_tokens, " tokens")
        inputs = _product((element, " bytes"), tokens, (head.hidden, ""))
        return (
            self._item("logits chunks", logits, words, source),
            self._item("teacher's head inputs", *inputs, source),
        )

    def _logits(self, most: int, of: str, element: int, blocks: int) -> tuple[int, str]:
        """Return the bytes of up to `most` rows of logits with fp32 blocks, and the formula."""
        vocabulary = self.layer.shape.vocabulary
        rows = min(most, self.layer.work.loss_tokens)
        block = min(rows, max(1, BLOCK_ELEMENTS[self.layer.form.device] // vocabulary))
        words = (
            f"({element} bytes x {rows:,} {of} + {blocks} x {FP32} bytes x {block:,} rows)"
            f" x {vocabulary:,} of the vocabulary"
        )
        return (element * rows + blocks * FP32 * block) * vocabulary, words

    def _all_logits(self) -> Item:
        """Return the tensors of a head that computes all logits at once.

        In training they are the logits, their fp32 copy, the log-softmax, its gradient, and the
        gradient of the logits.
        """
        each = 16 if self.layer.form.trained else self.layer.element + 2 * FP32
        vocabulary = (self.layer.shape.vocabulary, " of the vocabulary")
        logits = _product((each, " bytes"), (self.layer.tokens, " tokens"), vocabulary)
        source = "transformers' ForCausalLMLoss; 14.6-17.4 bytes by published rows"
        return self._item("logits", *logits, source)


def _device_bytes(parts: tuple[Item, ...]) -> int:
    return sum(part.bytes for part in parts if part.where == "device")
