"""What gradient checkpointing keeps of layers: their inputs, and where selective, products too."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plimsoll.model.price.layer import SOURCE, Layer
from plimsoll.shapes.shape import Linear
from plimsoll.timeline.items import Item, Kind, Where
from plimsoll.timeline.tensors import pinned_block

_LOG_SUM_EXP = 4  # bytes for each token and head


@dataclass(frozen=True)
class Part:
    """An item before it has a role."""

    name: str
    bytes: int
    formula: str
    source: str = SOURCE
    where: Where = "device"
    kind: Kind = "activations"

    def item(self, role: str) -> Item:
        """The item of a role."""
        words = self.formula, self.source
        return Item(role, self.kind, self.name, self.where, "allocated", self.bytes, *words)


@dataclass(frozen=True)
class CheckpointedLayers:
    """All layers of one micro-batch, of which some are checkpointed."""

    layer: Layer

    @property
    def count(self) -> int:
        """Those that are checkpointed."""
        every = self.layer.form.checkpoint_every
        return 0 if every is None else ceil(self.layer.shape.layers / every)

    @property
    def whole(self) -> int:
        """Those of which all is kept."""
        return self.layer.shape.layers - self.count

    @property
    def last_is_checkpointed(self) -> bool:
        """Whether the backward pass begins with one that is computed again."""
        every = self.layer.form.checkpoint_every
        return every is not None and (self.layer.shape.layers - 1) % every == 0

    def kept(self, undoing: bool) -> tuple[Part, ...]:
        """undoing: the backward pass is in the last layer."""
        again = undoing and self.last_is_checkpointed
        return (*self._inputs(), *(self._products(again) if self.layer.form.selective else ()))

    def _inputs(self) -> tuple[Part, ...]:
        element, tokens, hidden = self.layer.element, self.layer.tokens, self.layer.shape.hidden
        stream = element * tokens * hidden
        words = f"{element} bytes x {tokens:,} tokens x {hidden:,}"
        all_words = f"{self.count} checkpoints x {words}"
        source = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
        if not self.layer.form.inputs_on_host:
            return (Part("layer inputs", self.count * stream, all_words, source),)
        two = min(2, self.count)  # one in use, one on its way
        all_words += ", pinned blocks rounded up to powers of two"
        return (
            Part("layer inputs", two * stream, f"{two} x {words}", source),
            Part("layer inputs", self.count * pinned_block(stream), all_words, source, "host"),
        )

    def _products(self, again: bool) -> tuple[Part, ...]:
        """again: of one layer they are in use, but for the last, which nothing reads."""
        linears, attention, last = _products(self.layer)
        layers, last = self.count - again, again * last
        tokens = self.layer.tokens
        words = (
            f"{layers} layers x {tokens:,} tokens x (linears {linears // tokens:,}, attention "
            f"{attention // tokens:,}) bytes + {last:,} of the last linear"
        )
        kept = layers * (linears + attention) + last
        return (Part("kept activations", kept, words, "model/checkpointing.py"),)


def _products(layer: Layer) -> tuple[int, int, int]:
    """What selective checkpointing keeps of a layer beside its input, in bytes: the results of its
    linears, the attention's output, and the result of the last linear, which the backward pass
    neither reads nor computes again.

    Experts' products are computed again, and so is attention whose scores are written out.
    """
    element, shape, form = layer.element, layer.shape, layer.form
    attention = layer.tokens * shape.heads * (element * shape.head_dim + _LOG_SUM_EXP)
    unkept = shape.softcapped or form.attention == "eager" or form.written
    plain = (linear for linear in shape.linears if linear.stacked == 1)
    linears = sum(_width(layer, linear) * linear.count // shape.layers for linear in plain)
    last = 0 if shape.experts else element * layer.hidden
    return layer.tokens * linears, 0 if unkept else attention, last


def _width(layer: Layer, linear: Linear) -> int:
    """Bytes of a token's result in a linear layer and in each matrix of its adapter."""
    adapter, element = layer.form.adapter, layer.element
    if adapter is None or not layer.form.adapts(linear.name):
        return element * linear.outputs
    again = adapter.dora and adapter.dropout  # on the thinned input
    thin = adapter.rank < layer.shape.hidden // 2  # then its second matrix is computed again
    own = adapter.element * (adapter.rank + (0 if thin else linear.outputs))
    return element * linear.outputs * (1 + again) + own
