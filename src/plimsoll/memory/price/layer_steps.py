"""One decoder layer as a row of steps: what each saves for backward, and what its backward needs.

Counted from transformers 5's modeling files (models/*/modeling_*.py, integrations/moe.py) and
PyTorch's derivatives.yaml as they run: norms that compute in fp32, rotary embeddings that make new
tensors, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plimsoll.memory.price.activation_form import ActivationForm, AdapterForm
from plimsoll.memory.price.masks import aligned_mask_bytes
from plimsoll.memory.shapes.shape import Linear, MicroBatch, ModelShape

SOURCE = "counted from transformers 5's modeling files and PyTorch's derivatives.yaml"

_FP32 = 4
_FP32_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text")
_QK_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_POST_NORMS = ("gemma2", "gemma3", "gemma3_text")
_SOFTCAPS = ("gemma2",)

_QUERIES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn")
_OUTPUT = ("o_proj", "dense", "c_proj")
_GATES = ("gate_proj", "gate_up_proj", "w2", "fc1")
_UPS = ("up_proj", "w1")
_DOWN = ("down_proj", "fc2", "c_proj")


@dataclass(frozen=True)
class Step:
    """One step of a layer, in bytes.

    part: what it is counted under in words. saved: kept by the forward for the backward.
    scratch: what its backward allocates while `saved` is still there. gradient: of a weight, in
    flight at the same time. forward: all that its forward makes, where that may be the highest.
    """

    part: str
    saved: int
    scratch: int
    gradient: int = 0
    forward: int = 0


@dataclass(frozen=True)
class Summit:
    """Where a layer is highest: as Step, but `saved` is that of all steps done or not undone."""

    where: str
    saved: int
    scratch: int
    gradient: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.saved + self.scratch + self.gradient


def saved_bytes(steps: Iterable[Step]) -> int:
    """What the steps keep for their backward."""
    return sum(step.saved for step in steps)


def summit(steps: tuple[Step, ...]) -> Summit:
    """The highest point of a forward and of its backward from the last step to the first."""
    return max(_points(steps), key=lambda point: point.bytes)


def _points(steps: tuple[Step, ...]) -> Iterator[Summit]:
    saved = 0
    for step in steps:
        yield Summit(f"the forward of {step.part}", saved, step.forward, 0)
        saved += step.saved
        yield Summit(f"the backward of {step.part}", saved, step.scratch, step.gradient)


def layer_steps(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> tuple[Step, ...]:
    """The steps of one decoder layer, in the order of its forward."""
    layer = _Layer(shape, work, form)
    return (*layer.attention(), *(layer.experts() if shape.experts else layer.dense()))


def scoring_summit(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> Summit:
    """The highest point of a forward without autograd: what its local names hold."""
    layer = _Layer(shape, work, form)
    points = (layer.scoring_attention(), layer.scoring_mlp())
    return max(points, key=lambda point: point.bytes)


def final_norm(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> Step:
    """The norm before the head, whose output nothing saves as a whole."""
    layer = _Layer(shape, work, form)
    return layer.norm(layer.hidden, 1, kept=False)


class _Layer:
    """A layer's tensors; sizes in elements, unless they are said to be bytes."""

    def __init__(self, shape: ModelShape, work: MicroBatch, form: ActivationForm) -> None:
        self.shape, self.work, self.form = shape, work, form
        self.full = form.adapter is None
        self.hidden = work.tokens * shape.hidden
        self.queries = work.tokens * shape.heads * shape.head_dim
        self.keys = work.tokens * shape.kv_heads * shape.head_dim
        # Keys and values that a second sequence attends to; by sequence, its queries too.
        again = 2 * shape.kv_heads + 1.5 * shape.heads * (form.attention == "sdpa")
        self.gathered = int(work.shared * again * shape.head_dim)

    def attention(self) -> Iterator[Step]:
        family, element, shape = self.shape.family, self.form.element, self.shape
        projected = self.queries + 2 * self.keys
        fused = any(linear.name in ("qkv_proj", "c_attn") for linear in shape.linears)
        yield self.norm(self.hidden, 1, self.reads(_QUERIES))
        yield self.linear(_QUERIES, projected + self.hidden)
        if family in _QK_NORMS:
            yield self.norm(self.queries, shape.heads, False, 2 * self.keys)
            yield self.norm(self.keys, shape.kv_heads, False, self.keys + self.queries)
        if family not in _SOFTCAPS:
            # The rotary embedding makes new tensors; a slice of a fused projection keeps all of it.
            rotated = self.queries + self.keys + (projected if fused else self.keys)
            scratch = element * (projected + self.queries)
            yield Step("queries, keys, values", element * rotated, scratch)
        yield self.scores()
        yield self.linear(_OUTPUT, self.queries + self.post_norm)
        if family in _POST_NORMS:
            yield self.norm(self.hidden, 1, kept=False)

    def scores(self) -> Step:
        """The attention itself."""
        element, shape, tokens = self.form.element, self.shape, self.work.tokens
        output = element * self.queries
        by_sequence = self.form.attention == "sdpa" or shape.family in _SOFTCAPS
        joined = output if by_sequence and self.reads(_OUTPUT) else 0
        gathered = element * self.gathered
        gradients = element * (self.queries + 2 * self.keys) + gathered
        scores = tokens * self.work.longest * shape.heads
        largest = self.work.longest**2 * shape.heads
        if shape.family in _SOFTCAPS:  # fp32: queries, keys of every head, tanh, softmax; values
            again = (_FP32 + element) * self.work.shared * shape.heads * shape.head_dim
            saved = (2 * _FP32 + element) * (self.queries + scores) + again
            inputs = (2 * _FP32 + element) * self.queries + gradients + again
            forward = inputs + (2 * _FP32 + element) * (scores - largest) + 4 * _FP32 * largest
            return Step("attention scores", saved + joined, 6 * largest, 0, forward)
        if self.form.attention == "eager":
            saved = (_FP32 + element) * scores + 2 * output
            return Step("attention scores", saved + output, (_FP32 + element) * scores)
        masks = aligned_mask_bytes(shape, self.work, self.form)
        saved = output + _FP32 * tokens * shape.heads + gathered + masks
        return Step("attention", saved + joined, output + 2 * gradients - joined)

    def dense(self) -> Iterator[Step]:
        """The norm and the MLP."""
        yield self.norm(self.hidden, 1, self.reads((*_GATES, *_UPS)))
        yield from self.mlp(self.shape.intermediate)
        if self.shape.family in _POST_NORMS:
            yield self.norm(self.hidden, 1, kept=False)

    def mlp(self, width: int) -> Iterator[Step]:
        """An MLP that every token passes."""
        element = self.form.element
        inner, hidden = self.work.tokens * width, self.hidden + self.post_norm
        activated = 0 if self.form.compiled else inner
        product = activated if self.reads(_DOWN) else 0
        if not self.shape.gated:
            yield self.linear(_GATES, inner + hidden)
            yield Step("MLP", element * inner, element * 2 * inner)
        elif any(self._named(("gate_up_proj",))):
            yield self.linear(_GATES, 2 * inner + hidden)
            yield Step("MLP", element * (2 * inner + activated), element * 3 * inner)
        else:
            yield self.linear(_GATES, inner + 2 * hidden)
            yield Step("MLP", element * inner, element * (2 * inner + hidden))
            yield self.linear(_UPS, 2 * inner + hidden, beside=inner)
            yield Step("MLP", element * (inner + activated), element * 3 * inner)
        yield Step("MLP", element * product, 0)
        yield self.linear(_DOWN, inner + self.post_norm)

    def experts(self) -> Iterator[Step]:
        """The norm and the routed MLPs: each token's row is copied for each of its experts."""
        element, shape, tokens = self.form.element, self.shape, self.work.tokens
        pairs = tokens * shape.experts_per_token
        rows, inner = pairs * shape.hidden, pairs * shape.expert_intermediate
        matrices = element * shape.experts * shape.hidden * shape.expert_intermediate
        trained = 1 if self.full else 0
        yield self.norm(self.hidden, 1, self.full or bool(shape.shared_intermediate))
        if shape.shared_intermediate:
            yield from self.mlp(shape.shared_intermediate)
        yield Step("routing", _FP32 * tokens * shape.experts + 48 * pairs, element * 2 * rows)
        into = element * (2 * inner + rows)
        yield Step("experts", element * trained * rows, into, 2 * trained * matrices)
        yield Step("experts", element * 3 * inner, element * 3 * inner)
        out, back = element * (trained * inner + rows), element * (rows + inner)
        # The rows, their results, these weighted, and the gradient that calls for them.
        copies = element * (4 - trained) * rows
        yield Step("experts", out, back, trained * matrices, copies)

    def scoring_attention(self) -> Summit:
        """The embedding's output, the layer's input and its norm; queries, keys, values."""
        element, shape, work = self.form.element, self.shape, self.work
        held = element * (3 * self.hidden + self.queries + 2 * self.keys + self.gathered)
        scores = 3 * _FP32 * shape.heads * work.longest
        if shape.family in _SOFTCAPS:  # sequence by sequence, with queries and keys in fp32
            longest = 3 * _FP32 * self.queries // work.tokens + scores
            held += longest * work.longest
        elif self.form.attention == "eager":
            held += scores * work.tokens
        else:
            held += element * 2 * self.queries
        norms = (2 * element + 3 * _FP32) * self.hidden
        return Summit("the forward of attention", 0, max(held, norms) + self.written(_QUERIES), 0)

    def scoring_mlp(self) -> Summit:
        """The embedding's output, the layer's input, the residual and its norm; the MLP."""
        element, shape, tokens = self.form.element, self.shape, self.work.tokens
        fused = shape.experts or any(self._named(("gate_up_proj",)))
        widths = 2 + shape.gated + bool(fused)
        stream = element * 4 * self.hidden + self.written((*_GATES, *_DOWN))
        if not shape.experts:
            inner = element * widths * tokens * shape.intermediate
            return Summit("the forward of MLP", 0, stream + inner, 0)
        pairs = element * tokens * shape.experts_per_token
        rows, inner = pairs * shape.hidden, pairs * widths * shape.expert_intermediate
        return Summit("the forward of experts", 0, stream + max(rows + inner, 4 * rows), 0)

    @property
    def post_norm(self) -> int:
        """The gradient of what a norm after a block reads, beside that of the residual stream."""
        return self.hidden if self.shape.family in _POST_NORMS else 0

    def reads(self, names: tuple[str, ...]) -> bool:
        """Whether any of these linears saves its input as it is."""
        adapter = self.form.adapter
        if adapter is None:
            return True
        copied = adapter.dropout or adapter.element > self.form.element
        return not copied and any(self._adapted(names))

    def norm(self, elements: int, rows: int, kept: bool, beside: int = 0) -> Step:
        """An RMS norm. kept: what reads its output saves that. beside: gradients that wait.

        Llama's saves its input in fp32 and, for the weight's gradient, the normalised input in
        its own dtype; Gemma's multiplies by (1 + weight) in fp32.
        """
        element = self.form.element
        output = element * elements if kept else 0
        wait = element * beside
        if self.form.compiled:
            return Step("norms", element * elements, 2 * _FP32 * elements + wait)
        width = _FP32 if self.shape.family in _FP32_NORMS else element
        normalised = width * elements if self.full else 0
        saved = _FP32 * (elements + rows * self.work.tokens) + normalised + output
        return Step("norms", saved, 5 * _FP32 * elements - normalised - output + wait)

    def linear(self, names: tuple[str, ...], scratch: int, beside: int = 0) -> Step:
        """Linears with one input, which whatever made it counts; here only what adapters save.

        beside: what the forward holds besides, and saves later.
        """
        element, adapter, written = self.form.element, self.form.adapter, self.written(names)
        if adapter is None:
            gradient = element * self.largest(names)
            return Step("linears", 0, element * scratch + written, gradient)
        saved = sum(self._adapter_saves(adapter, names))
        widest = max((linear.outputs for linear in self._adapted(names)), default=0)
        # The frozen layer's result, the adapter's, and the adapter's scaled.
        results = (element + 2 * adapter.element) * self.work.tokens * widest
        inputs = element * (beside + self.hidden)
        if adapter.element > element:  # the norm's output, and the gradient that calls for it all
            inputs += (adapter.element + 2 * element) * self.hidden
        back = element * scratch + written + adapter.element * self.work.tokens * widest
        return Step("adapters", saved, back, 0, saved + results + inputs)

    def largest(self, names: tuple[str, ...]) -> int:
        """Elements of the largest weight of these linears."""
        return max((lin.inputs * lin.outputs for lin in self._named(names)), default=0)

    def written(self, names: tuple[str, ...]) -> int:
        """A quantised weight as it is used; bytes."""
        return self.form.element * self.largest(names) if self.form.quantized else 0

    def _adapter_saves(self, adapter: AdapterForm, names: tuple[str, ...]) -> Iterator[int]:
        tokens = self.work.tokens
        for linear in self._adapted(names):
            yield adapter.element * tokens * adapter.rank
            if adapter.dropout or adapter.element > self.form.element:
                yield adapter.element * tokens * linear.inputs
            if adapter.dropout:  # the mask
                mask = 1 if self.form.device == "cuda" else adapter.element
                yield mask * tokens * linear.inputs

    def _adapted(self, names: tuple[str, ...]) -> Iterator[Linear]:
        return (linear for linear in self._named(names) if self.form.adapts(linear.name))

    def _named(self, names: tuple[str, ...]) -> Iterator[Linear]:
        return (lin for lin in self.shape.linears if lin.name in names and lin.stacked == 1)
