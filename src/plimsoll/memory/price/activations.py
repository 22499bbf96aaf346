"""What one micro-batch holds beside weights and gradients: saved tensors, working sets, logits.

A forward and backward has three heights, and the highest of them counts: the head, with all layers
behind it and none undone; the last layer's backward; and, where the embedding is trained, the
embedding's gradient at the very end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plimsoll.memory.items import Held, Item, Moment, Phase, Where
from plimsoll.memory.price.activation_form import (
    ActivationForm,
    ChunkedHead,
    UnfusedHead,
    ValueHead,
)
from plimsoll.memory.price.layer_steps import (
    SOURCE,
    Step,
    final_norm,
    layer_steps,
    saved_bytes,
    scoring_summit,
    summit,
)
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape

_FP32 = 4
_INT64 = 8
_BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}  # as in model/token_logprobs.py
_TWO_ROTARY_TABLES = ("gemma3", "gemma3_text")


def activation_items(
    role: str, shape: ModelShape, work: MicroBatch, form: ActivationForm, phase: Phase
) -> tuple[Held, ...]:
    """What the largest forward (and backward) of a phase holds at its highest point.

    Held at the instant `forward_backward` where the form is trained, else at `forward`.
    """
    moment = Moment(phase, "forward_backward" if form.trained else "forward")
    micro_batch = _MicroBatch(shape, work, form)
    return tuple(
        Held(
            Item(role, part.name, part.where, "allocated", part.bytes, part.formula, part.source),
            frozenset({moment}),
        )
        for part in (micro_batch.trained() if form.trained else micro_batch.scored())
        if part.bytes
    )


@dataclass(frozen=True)
class _Part:
    """An item before it has a role."""

    name: str
    bytes: int
    formula: str
    source: str = SOURCE
    where: Where = "device"


@dataclass(frozen=True)
class _MicroBatch:
    """The heights of one micro-batch; each is all that lives at that point."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    def trained(self) -> tuple[_Part, ...]:
        heights = (self._at_head(), self._at_layer(), self._at_embedding())
        return max(heights, key=_device_bytes)

    def scored(self) -> tuple[_Part, ...]:
        top = scoring_summit(self.shape, self.work, self.form)
        words = f"{top.bytes:,} bytes in {top.where}"
        layer = (self._positions(), _Part("working set", top.bytes, words))
        return max((layer, (self._positions(), *self._head())), key=_device_bytes)

    def _at_head(self) -> tuple[_Part, ...]:
        last = final_norm(self.shape, self.work, self.form).saved
        norm = f"{last:,} of the last norm"
        if self.form.checkpoint_every is not None:
            kept = (*self._layer_inputs(), _Part("activations", last, norm))
        else:
            steps = layer_steps(self.shape, self.work, self.form)
            saved = self.shape.layers * saved_bytes(steps) + last
            words = f"{self._layers(self.shape.layers, steps)} + {norm}"
            kept = (_Part("activations", saved, words),)
        return (self._positions(), *kept, *self._head())

    def _at_layer(self) -> tuple[_Part, ...]:
        every, layers = self.form.checkpoint_every, self.shape.layers
        steps = layer_steps(self.shape, self.work, self.form)
        top = summit(steps)
        others = (layers if every is None else min(every, layers)) - 1
        saved = _Part(
            "activations" if every is None else "recomputed activations",
            others * saved_bytes(steps) + top.saved,
            f"{self._layers(others, steps)} + {top.saved:,} of the last layer",
        )
        words = f"{top.scratch:,} bytes in {top.where} + {self._stream_words}"
        working = _Part("working set", top.scratch + self._stream, words)
        inputs = () if every is None else self._layer_inputs()
        waiting = self._tables(1 if self._tied else 0, "held for the tied embedding")
        flight = _Part("gradients in flight", top.gradient, f"{top.gradient:,} bytes of a weight")
        return (self._positions(), *inputs, saved, working, flight, waiting)

    def _at_embedding(self) -> tuple[_Part, ...]:
        """Autograd adds the embedding's gradient and a tied head's into a third tensor."""
        if self.form.adapter is not None:
            return ()
        if self._tied:
            return (self._tables(3, "of the tied embedding, at the end"),)
        stream = _Part("working set", self._stream, self._stream_words)
        return (stream, self._tables(1, "of the embedding, at the end"))

    @property
    def _tied(self) -> bool:
        return self.shape.tied and not isinstance(self.form.head, ValueHead)

    @property
    def _stream(self) -> int:
        """Hidden states of all tokens, or their gradient; bytes."""
        return self.form.element * self.work.tokens * self.shape.hidden

    @property
    def _stream_words(self) -> str:
        element, tokens, hidden = self.form.element, self.work.tokens, self.shape.hidden
        return f"{element} bytes x {tokens:,} tokens x {hidden:,}"

    def _layers(self, count: int, steps: tuple[Step, ...]) -> str:
        """In words: what they save, by part."""
        parts: dict[str, int] = {}
        for step in steps:
            parts[step.part] = parts.get(step.part, 0) + step.saved
        each = ", ".join(
            f"{part} {saved / self.work.tokens:,.0f}" for part, saved in parts.items() if saved
        )
        return f"{count} layers x {self.work.tokens:,} tokens x ({each}) bytes"

    def _layer_inputs(self) -> tuple[_Part, ...]:
        every = self.form.checkpoint_every or 1
        count = ceil(self.shape.layers / every)
        source = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
        words = f"{count} checkpoints x {self._stream_words}"
        if not self.form.inputs_on_host:
            return (_Part("layer inputs", count * self._stream, words, source),)
        two = min(2, count)  # one in use, one on its way
        return (
            _Part("layer inputs", two * self._stream, f"{two} x {self._stream_words}", source),
            _Part("layer inputs", count * self._stream, words, source, "host"),
        )

    def _positions(self) -> _Part:
        tokens, element = self.work.tokens, self.form.element
        tables = 4 if self.shape.family in _TWO_ROTARY_TABLES else 2
        wide = tables * element * self.shape.head_dim
        numbers = 2 * _INT64 * (tokens + self.work.learned)
        words = f"{tokens:,} tokens x {wide:,} bytes + {numbers:,} of token ids and positions"
        return _Part("input ids and rotary tables", tokens * wide + numbers, words)

    def _tables(self, count: int, what: str) -> _Part:
        """Gradients as large as the embedding."""
        element, vocabulary, hidden = self.form.element, self.shape.vocabulary, self.shape.hidden
        if self.form.adapter is not None:
            count = 0
        words = f"{count} x {element} bytes x {vocabulary:,} x {hidden:,} {what}"
        return _Part("embedding gradients in flight", count * element * vocabulary * hidden, words)

    def _head(self) -> tuple[_Part, ...]:
        """From the last hidden states to the loss, and back where it is trained."""
        match self.form.head:
            case ChunkedHead() as head:
                return (*self._chunked(head), self._head_gradient())
            case UnfusedHead(widened):
                return (*self._unfused(widened), self._head_gradient())
            case ValueHead():
                return (self._value(),)

    def _head_gradient(self) -> _Part:
        return self._tables(1 if self.form.trained else 0, "of the head")

    def _head_inputs(self, rows: int, element: int) -> _Part:
        both = 2 if self.form.trained else 1
        words = f"{both} x {element} bytes x {rows:,} tokens x {self.shape.hidden:,}"
        return _Part("head inputs", both * element * rows * self.shape.hidden, words)

    def _chunked(self, head: ChunkedHead) -> tuple[_Part, ...]:
        vocabulary, element = self.shape.vocabulary, self.form.element
        rows = min(head.rows, self.work.learned)
        block = min(rows, max(1, _BLOCK_ELEMENTS[self.form.device] // vocabulary))
        blocks = 2 + head.entropy + 2 * self._softcapped + head.scaled
        words = (
            f"({element} bytes x {rows:,} rows + {blocks} x {_FP32} bytes x {block:,} rows)"
            f" x {vocabulary:,} of the vocabulary"
        )
        logits = (element * rows + blocks * _FP32 * block) * vocabulary
        source = "model/token_logprobs.py"
        return (
            self._head_inputs(self.work.learned, element),
            _Part("logits chunk", logits, words, source),
        )

    @property
    def _softcapped(self) -> bool:
        return self.shape.family == "gemma2"

    def _unfused(self, widened: bool) -> tuple[_Part, ...]:
        """Trained: logits, their fp32 copy, log-softmax, its gradient, the logits' gradient; where
        nothing is widened, a copy without the last token in place of the fp32 one."""
        tokens, vocabulary = self.work.tokens, self.shape.vocabulary
        trained = 16 if widened else 4 * self.form.element
        each = trained if self.form.trained else self.form.element + 2 * _FP32
        words = f"{each} bytes x {tokens:,} tokens x {vocabulary:,} of the vocabulary"
        source = "transformers' ForCausalLMLoss; 14.6-17.4 bytes by published rows"
        return (
            self._head_inputs(tokens, self.form.element),
            _Part("logits", each * tokens * vocabulary, words, source),
        )

    def _value(self) -> _Part:
        return self._head_inputs(self.work.learned, _FP32)


def _device_bytes(parts: tuple[_Part, ...]) -> int:
    return sum(part.bytes for part in parts if part.where == "device")
