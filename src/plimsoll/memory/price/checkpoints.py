"""What gradient checkpointing keeps of layers: their inputs, and where selective, products too."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plimsoll.memory.items import Item, Where
from plimsoll.memory.price.activation_form import ActivationForm
from plimsoll.memory.price.kept_products import kept_products
from plimsoll.memory.price.states import pinned_block
from plimsoll.memory.price.steps import SOURCE
from plimsoll.shapes.shape import MicroBatch, ModelShape


@dataclass(frozen=True)
class Part:
    """An item before it has a role."""

    name: str
    bytes: int
    formula: str
    source: str = SOURCE
    where: Where = "device"

    def item(self, role: str) -> Item:
        """The item of a role."""
        return Item(role, self.name, self.where, "allocated", self.bytes, self.formula, self.source)


@dataclass(frozen=True)
class CheckpointedLayers:
    """All layers of one micro-batch, of which some are checkpointed."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    @property
    def count(self) -> int:
        """Those that are checkpointed."""
        every = self.form.checkpoint_every
        return 0 if every is None else ceil(self.shape.layers / every)

    @property
    def whole(self) -> int:
        """Those of which all is kept."""
        return self.shape.layers - self.count

    @property
    def last_is_checkpointed(self) -> bool:
        """Whether the backward pass begins with one that is computed again."""
        every = self.form.checkpoint_every
        return every is not None and (self.shape.layers - 1) % every == 0

    def kept(self, undoing: bool) -> tuple[Part, ...]:
        """undoing: the backward pass is in the last layer."""
        again = undoing and self.last_is_checkpointed
        return (*self._inputs(), *(self._products(again) if self.form.selective else ()))

    def _inputs(self) -> tuple[Part, ...]:
        element, tokens, hidden = self.form.element, self.work.tokens, self.shape.hidden
        stream = element * tokens * hidden
        words = f"{element} bytes x {tokens:,} tokens x {hidden:,}"
        all_words = f"{self.count} checkpoints x {words}"
        source = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
        if not self.form.inputs_on_host:
            return (Part("layer inputs", self.count * stream, all_words, source),)
        two = min(2, self.count)  # one in use, one on its way
        all_words += ", pinned blocks rounded up to powers of two"
        return (
            Part("layer inputs", two * stream, f"{two} x {words}", source),
            Part("layer inputs", self.count * pinned_block(stream), all_words, source, "host"),
        )

    def _products(self, again: bool) -> tuple[Part, ...]:
        """again: of one layer they are in use, but for the last, which nothing reads."""
        kept = kept_products(self.shape, self.work, self.form)
        layers, last = self.count - again, again * kept.last
        linears, attention = (each // self.work.tokens for each in (kept.linears, kept.attention))
        words = (
            f"{layers} layers x {self.work.tokens:,} tokens x (linears {linears:,}, attention "
            f"{attention:,}) bytes + {last:,} of the last linear"
        )
        source = "model/checkpointing.py"
        return (Part("kept activations", layers * kept.bytes + last, words, source),)
