"""One decoder layer of one micro-batch: its tensors' sizes, and what its linears read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.memory.price.activation_form import BLOCK_ELEMENTS, ActivationForm
from plimsoll.memory.price.masks import repeated_share, sees_all_before
from plimsoll.shapes.shape import Linear, MicroBatch, ModelShape

QUERIES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn")
OUTPUT = ("o_proj", "dense", "c_proj")
GATES = ("gate_proj", "gate_up_proj", "w2", "fc1")
UPS = ("up_proj", "w1")
DOWN = ("down_proj", "fc2", "c_proj")

_FP32 = 4


@dataclass(frozen=True)
class Layer:
    """Sizes in elements, unless they are said to be bytes."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.form.adapter is None

    @property
    def hidden(self) -> int:
        """The residual stream."""
        return self.work.tokens * self.shape.hidden

    @property
    def queries(self) -> int:
        """Of all heads."""
        return self.work.tokens * self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        """As many as values."""
        return self.work.tokens * self.shape.kv_heads * self.shape.head_dim

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
        if sees_all_before(self.shape, self.work, self.form):
            return 0
        by_sequence = self.form.attention == "sdpa"
        more = (self.shape.heads - self.shape.kv_heads) * self._repeated
        again = 2 * (self.shape.kv_heads + more) + 1.5 * self.shape.heads * by_sequence
        return int(self.work.shared * again * self.shape.head_dim)

    @property
    def _repeated(self) -> float:
        return repeated_share(self.shape, self.work, self.form)

    @property
    def weighted(self) -> int:
        """How many times as wide an expert's result becomes by its weight, which may be fp32."""
        return _FP32 // self.form.element if self.shape.traits.fp32_routing else 1

    @property
    def post_norm(self) -> int:
        """The gradient of what a norm after a block reads, beside that of the residual stream."""
        return self.hidden if self.shape.traits.post_norms else 0

    @property
    def fused_norms(self) -> bool:
        """Whether its norms are those of model/fused.py."""
        return self.form.fused and self.shape.traits.norms == "rms"

    @property
    def fused_gates(self) -> bool:
        """Whether its gated MLPs are those of model/fused.py. Gemma's, with GELU, are not."""
        return self.fused_norms and any(self.named(("gate_proj",)))

    def normed_at_once(self, elements: int) -> int:
        """How many of a norm's elements are in fp32 together."""
        return min(elements, BLOCK_ELEMENTS[self.form.device]) if self.fused_norms else elements

    def reads(self, names: tuple[str, ...]) -> bool:
        """Whether any of these linears saves its input as it is."""
        adapter = self.form.adapter
        if adapter is None:
            return True
        copied = adapter.dropout or adapter.element > self.form.element
        return not copied and any(self.adapted(names))

    def largest(self, names: tuple[str, ...]) -> int:
        """Elements of the largest weight of these linears."""
        return max((lin.inputs * lin.outputs for lin in self.named(names)), default=0)

    def written(self, names: tuple[str, ...]) -> int:
        """A quantised weight as it is used; bytes."""
        return self.form.element * self.largest(names) if self.form.quantized else 0

    def adapted(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Those of these linears that have an adapter."""
        return (linear for linear in self.named(names) if self.form.adapts(linear.name))

    def named(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Linears of these names, without stacked experts."""
        return (lin for lin in self.shape.linears if lin.name in names and lin.stacked == 1)
