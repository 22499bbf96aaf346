"""One decoder layer of one micro-batch: its tensors' sizes, its masks, what its linears read; and
what a step of its forward and backward is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from plimsoll.model.price.form import BLOCK_ELEMENTS, ActivationForm, Fused
from plimsoll.shapes.shape import Linear, MicroBatch, ModelShape

SOURCE = "counted from transformers 5's modeling files and PyTorch's derivatives.yaml"

QUERIES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn")
OUTPUT = ("o_proj", "dense", "c_proj")
GATES = ("gate_proj", "gate_up_proj", "w2", "fc1")
UPS = ("up_proj", "w1")
DOWN = ("down_proj", "fc2", "c_proj")

FP32 = 4

_FUSED_NORMS: Mapping[Fused, tuple[str, ...]] = {
    "none": (),
    "own": ("rms",),
    "liger": ("rms", "rms_fp32"),
}


@dataclass(frozen=True)
class Layer:
    """Sizes in elements, unless they are said to be bytes."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return self.form.element

    @property
    def tokens(self) -> int:
        """Of the micro-batch."""
        return self.work.tokens

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.form.adapter is None

    @property
    def hidden(self) -> int:
        """The residual stream."""
        return self.tokens * self.shape.hidden

    @property
    def queries(self) -> int:
        """Of all heads."""
        return self.tokens * self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        """As many as values."""
        return self.tokens * self.shape.kv_heads * self.shape.head_dim

    @property
    def attended(self) -> int:
        """The keys as attention gets them, as many as values: of every head where they are
        repeated."""
        return int(self.keys + (self.queries - self.keys) * self._repeated)

    @property
    def longest_attended(self) -> int:
        """Those of the longest sequence that are repeated, and of values as many."""
        return int(self._repeated * self.work.longest * self.shape.heads * self.shape.head_dim)

    @property
    def gathered(self) -> int:
        """Keys and values that a second sequence attends to; by sequence, its queries too."""
        if self.sees_all_before:
            return 0
        by_sequence = self.form.attention == "sdpa"
        more = (self.shape.heads - self.shape.kv_heads) * self._repeated
        again = 2 * (self.shape.kv_heads + more) + 1.5 * self.shape.heads * by_sequence
        return int(self.work.shared * again * self.shape.head_dim)

    @property
    def weighted(self) -> int:
        """How many times as wide an expert's result becomes by its weight, which may be fp32."""
        return FP32 // self.element if self.shape.traits.fp32_routing else 1

    @property
    def post_norm(self) -> int:
        """The gradient of what a norm after a block reads, beside that of the residual stream."""
        return self.hidden if self.shape.traits.post_norms else 0

    @property
    def fused_norms(self) -> bool:
        """Whether its norms keep their input as it is: of a kind that is fused."""
        return self.shape.traits.norms in _FUSED_NORMS[self.form.fused]

    @property
    def fused_gates(self) -> bool:
        """Whether its gated MLPs are fused: Gemma's, with GELU, by Liger's kernels alone."""
        return self.fused_norms and any(self.named(("gate_proj",)))

    def normed_at_once(self, elements: int) -> int:
        """How many of a norm's elements are in fp32 in memory together."""
        return self.fused_at_once(elements) if self.fused_norms else elements

    def fused_at_once(self, elements: int) -> int:
        """How many elements a fused step has in memory together, besides its results: ours a block
        of them, Liger's none."""
        own = self.form.fused == "own"
        return min(elements, BLOCK_ELEMENTS[self.form.device]) if own else 0

    def reads(self, names: tuple[str, ...]) -> bool:
        """Whether any of these linears saves its input as it is."""
        adapter = self.form.adapter
        if adapter is None:
            return True
        copied = adapter.dropout or adapter.element > self.element
        return not copied and any(self.adapted(names))

    def largest(self, names: tuple[str, ...]) -> int:
        """Elements of the largest weight of these linears."""
        return max((lin.inputs * lin.outputs for lin in self.named(names)), default=0)

    def written(self, names: tuple[str, ...]) -> int:
        """A quantised weight as it is used; bytes."""
        return self.element * self.largest(names) if self.form.quantized else 0

    def adapted(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Those of these linears that have an adapter."""
        return (linear for linear in self.named(names) if self.form.adapts(linear.name))

    def named(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Linears of these names, without stacked experts."""
        return (lin for lin in self.shape.linears if lin.name in names and lin.stacked == 1)

    @property
    def mask_bytes(self) -> int:
        """The masks of packed attention, where a kernel's own causal mask does not do
        (model/attention.py): a number for each query and each key of sequences that are longer than
        the window, that begin as another does, or whose scores are bounded. All layers share them.
        """
        softcapped = self.shape.softcapped
        if (self.form.attention != "sdpa" and not softcapped) or self.sees_all_before:
            return 0
        kinds = (self.work.shared > 0 or softcapped) + self._windowed
        return kinds * self.element * self.tokens * self.work.longest

    @property
    def aligned_mask_bytes(self) -> int:
        """What a card's kernels make of them in a layer, to align their rows; the mean over all
        layers, of which only some may have a window."""
        if not self._by_kernel or self.form.written:
            return 0
        return self.element * self.tokens * self.work.longest * self._masked // self.shape.layers

    @property
    def sees_all_before(self) -> bool:
        """Whether a CPU's kernel for whole packs serves (model/cpu/attention.py)."""
        plain = not self.shape.softcapped and not self._windowed
        return self.form.device == "cpu" and self.form.attention == "sdpa" and plain

    @property
    def _repeated(self) -> float:
        """Of the layers, those in which a card's kernel gets keys and values repeated for every
        head of queries (model/attention.py)."""
        if not self._by_kernel or self.shape.heads == self.shape.kv_heads:
            return 0.0
        return self._masked / self.shape.layers if self.form.flash else 1.0

    @property
    def _by_kernel(self) -> bool:
        form = self.form
        return form.attention == "sdpa" and not self.shape.softcapped and form.device != "cpu"

    @property
    def _masked(self) -> int:
        """Layers."""
        if self.work.shared:
            return self.shape.layers
        return self.shape.sliding_layers if self._windowed else 0

    @property
    def _windowed(self) -> bool:
        window = self.shape.sliding_window
        return window is not None and self.work.longest > window


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
