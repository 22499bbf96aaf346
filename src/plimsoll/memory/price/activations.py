"""What one micro-batch holds beside weights and gradients: saved tensors, working sets, logits.

A forward and backward has three heights, and the highest of them counts: the head, with all layers
behind it and none undone; the last layer's backward; and, where the embedding is trained, the
embedding's gradient at the very end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plimsoll.memory.items import Held, Moment
from plimsoll.memory.price.activation_form import (
    BLOCK_ELEMENTS,
    ActivationForm,
    ChunkedHead,
    NoHead,
    TaughtHead,
    UnfusedHead,
    ValueHead,
)
from plimsoll.memory.price.checkpoints import CheckpointedLayers, Part
from plimsoll.memory.price.layer_steps import final_norm, layer_steps, recomputed_steps
from plimsoll.memory.price.masks import mask_bytes
from plimsoll.memory.price.scoring_steps import scoring_summit
from plimsoll.memory.price.steps import Step, saved_bytes, summit
from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.spec.run_spec import Phase

_FP32 = 4
_INT64 = 8
_TAUGHT_BLOCKS = 8  # fp32, of student, teacher and divergence: at most, by the heads' test


def activation_items(
    role: str, shape: ModelShape, work: MicroBatch, form: ActivationForm, phase: Phase
) -> tuple[Held, ...]:
    """What the largest forward (and backward) of a phase holds at its highest point.

    Held at the instant `forward_backward` where the form is trained, else at `forward`.
    """
    moment = Moment(phase, "forward_backward" if form.trained else "forward")
    micro_batch = _MicroBatch(shape, work, form)
    return tuple(micro_batch.held(role, moment, (micro_batch.masks(), *micro_batch.highest())))


def backward_items(
    role: str, shape: ModelShape, work: MicroBatch, form: ActivationForm, at: Moment, left: int
) -> tuple[Held, ...]:
    """What is held of it where the last of the first `left` layers is undone."""
    if left == 0:
        return ()
    lower = _lower(shape, left)
    micro_batch = _MicroBatch(lower, work, form)
    parts = (_MicroBatch(shape, work, form).masks(), *micro_batch.at_layer())
    return tuple(micro_batch.held(role, at, parts))


def _lower(shape: ModelShape, layers: int) -> ModelShape:
    """The first so many layers of it."""

    def share(count: int) -> int:
        return count * layers // shape.layers

    return replace(
        shape,
        layers=layers,
        sliding_layers=share(shape.sliding_layers),
        linears=tuple(replace(linear, count=share(linear.count)) for linear in shape.linears),
    )


@dataclass(frozen=True)
class _MicroBatch:
    """The heights of one micro-batch; each is all that lives at that point."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    def held(self, role: str, moment: Moment, parts: tuple[Part, ...]) -> Iterator[Held]:
        """Those that are not empty, as a role's items."""
        for part in parts:
            if part.bytes:
                yield Held(part.item(role), frozenset({moment}))

    def masks(self) -> Part:
        """Theirs all the time."""
        tokens, longest = self.work.tokens, self.work.longest
        words = f"masks of {tokens:,} queries x {longest:,} keys, for all layers"
        made = mask_bytes(self.shape, self.work, self.form)
        return Part("attention masks", made, words, "model/attention.py")

    def highest(self) -> tuple[Part, ...]:
        """All else, where it is most."""
        return self.trained() if self.form.trained else self.scored()

    def trained(self) -> tuple[Part, ...]:
        heights = (self._at_head(), self.at_layer(), self._at_embedding())
        return max(heights, key=_device_bytes)

    def scored(self) -> tuple[Part, ...]:
        top = scoring_summit(self.shape, self.work, self.form)
        words = f"{top.bytes:,} bytes in {top.where}"
        layer = (self._positions(), Part("working set", top.bytes, words))
        return max((layer, (self._positions(), *self._head())), key=_device_bytes)

    def _at_head(self) -> tuple[Part, ...]:
        last = final_norm(self.shape, self.work, self.form).saved
        steps = layer_steps(self.shape, self.work, self.form)
        words = f"{last:,} of the last norm"
        whole = self._layers.whole
        if whole:
            words = f"{self._saved_words(whole, steps)} + {words}"
        kept = Part("activations", whole * saved_bytes(steps) + last, words)
        return (self._positions(), *self._layers.kept(undoing=False), kept, *self._head())

    def at_layer(self) -> tuple[Part, ...]:
        """Where the last layer is whole, no checkpointed one is higher: it has the former below."""
        steps = layer_steps(self.shape, self.work, self.form)
        again = self._layers.last_is_checkpointed
        top = summit(recomputed_steps(self.shape, self.work, self.form) if again else steps)
        others = self._layers.whole if again else self._layers.whole - 1
        saved = Part(
            "recomputed activations" if again else "activations",
            others * saved_bytes(steps) + top.saved,
            f"{self._saved_words(others, steps)} + {top.saved:,} of the last layer",
        )
        words = f"{top.scratch:,} bytes in {top.where} + {self._stream_words}"
        working = Part("working set", top.scratch + self._stream, words)
        waiting = self._tables(1 if self._tied else 0, "held for the tied embedding")
        flight = Part("gradients in flight", top.gradient, f"{top.gradient:,} bytes of a weight")
        kept = self._layers.kept(undoing=True)
        return (self._positions(), *kept, saved, working, flight, waiting)

    @property
    def _layers(self) -> CheckpointedLayers:
        return CheckpointedLayers(self.shape, self.work, self.form)

    def _at_embedding(self) -> tuple[Part, ...]:
        """Autograd adds the embedding's gradient and a tied head's into a third tensor."""
        if self.form.adapter is not None:
            return ()
        if self._tied:
            return (self._tables(3, "of the tied embedding, at the end"),)
        stream = Part("working set", self._stream, self._stream_words)
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

    def _saved_words(self, count: int, steps: tuple[Step, ...]) -> str:
        """In words: what they save, by part."""
        parts: dict[str, int] = {}
        for step in steps:
            parts[step.part] = parts.get(step.part, 0) + step.saved
        each = ", ".join(
            f"{part} {saved / self.work.tokens:,.0f}" for part, saved in parts.items() if saved
        )
        return f"{count} layers x {self.work.tokens:,} tokens x ({each}) bytes"

    def _positions(self) -> Part:
        tokens, element = self.work.tokens, self.form.element
        wide = 2 * self.shape.traits.rotary_tables * element * self.shape.head_dim
        numbers = 2 * _INT64 * (tokens + self.work.learned)
        words = f"{tokens:,} tokens x {wide:,} bytes + {numbers:,} of token ids and positions"
        return Part("input ids and rotary tables", tokens * wide + numbers, words)

    def _tables(self, count: int, what: str) -> Part:
        """Gradients as large as the embedding."""
        element, vocabulary, hidden = self.form.element, self.shape.vocabulary, self.shape.hidden
        if self.form.adapter is not None:
            count = 0
        words = f"{count} x {element} bytes x {vocabulary:,} x {hidden:,} {what}"
        table = element * vocabulary * hidden
        return Part("embedding gradients in flight", count * table, words)

    def _head(self) -> tuple[Part, ...]:
        """From the last hidden states to the loss, and back where it is trained."""
        match self.form.head:
            case ChunkedHead() as head:
                return (*self._chunked(head), self._head_gradient())
            case UnfusedHead():
                return (*self._unfused(), self._head_gradient())
            case TaughtHead() as head:
                return (*self._taught(head), self._head_gradient())
            case ValueHead():
                return (self._value(),)
            case NoHead():
                return (self._head_inputs(self.work.learned, self.form.element),)

    def _head_gradient(self) -> Part:
        return self._tables(1 if self.form.trained else 0, "of the head")

    def _head_inputs(self, rows: int, element: int) -> Part:
        both = 2 if self.form.trained else 1
        words = f"{both} x {element} bytes x {rows:,} tokens x {self.shape.hidden:,}"
        return Part("head inputs", both * element * rows * self.shape.hidden, words)

    def _chunked(self, head: ChunkedHead) -> tuple[Part, ...]:
        vocabulary, element = self.shape.vocabulary, self.form.element
        rows = min(head.rows, self.work.learned)
        block = min(rows, max(1, BLOCK_ELEMENTS[self.form.device] // vocabulary))
        blocks = 2 + head.entropy + 2 * self.shape.logits_softcapped + head.scaled
        words = (
            f"({element} bytes x {rows:,} rows + {blocks} x {_FP32} bytes x {block:,} rows)"
            f" x {vocabulary:,} of the vocabulary"
        )
        logits = (element * rows + blocks * _FP32 * block) * vocabulary
        source = "model/token_logprobs.py"
        return (
            self._head_inputs(self.work.learned, element),
            Part("logits chunk", logits, words, source),
        )

    def _taught(self, head: TaughtHead) -> tuple[Part, ...]:
        """The gradients are made where the logits are, so both chunks and both inputs are there."""
        vocabulary, learned = self.shape.vocabulary, self.work.learned
        element = self.form.element + head.element
        rows = min(head.rows, learned)
        block = min(rows, max(1, BLOCK_ELEMENTS[self.form.device] // vocabulary))
        blocks = _TAUGHT_BLOCKS + self.shape.logits_softcapped
        words = (
            f"({element} bytes x {rows:,} rows of both + {blocks} x {_FP32} bytes x {block:,} rows)"
            f" x {vocabulary:,} of the vocabulary"
        )
        logits = (element * rows + blocks * _FP32 * block) * vocabulary
        source = "model/distillation.py"
        states = head.element * learned * head.hidden
        return (
            self._head_inputs(learned, self.form.element),
            Part("logits chunks", logits, words, source),
            Part(
                "teacher's head inputs",
                states,
                f"{head.element} bytes x {learned:,} tokens x {head.hidden:,}",
                source,
            ),
        )

    def _unfused(self) -> tuple[Part, ...]:
        """Trained: logits, their fp32 copy, log-softmax, its gradient, the logits' gradient."""
        tokens, vocabulary = self.work.tokens, self.shape.vocabulary
        each = 16 if self.form.trained else self.form.element + 2 * _FP32
        words = f"{each} bytes x {tokens:,} tokens x {vocabulary:,} of the vocabulary"
        source = "transformers' ForCausalLMLoss; 14.6-17.4 bytes by published rows"
        return (
            self._head_inputs(tokens, self.form.element),
            Part("logits", each * tokens * vocabulary, words, source),
        )

    def _value(self) -> Part:
        return self._head_inputs(self.work.learned, _FP32)


def _device_bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts if part.where == "device")
