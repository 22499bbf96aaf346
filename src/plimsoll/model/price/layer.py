"""Sizes of one decoder layer's tensors in one micro-batch, and the steps of its passes.

A step is a part of the layer's forward with its backward, such as a norm or the attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from plimsoll.config.engine import EXPERTS
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
    """A decoder layer in one micro-batch. Sizes are in elements, unless bytes are named."""

    shape: ModelShape
    work: MicroBatch
    form: ActivationForm

    @property
    def attending(self) -> Layer:
        """The layer as its attention's kernel sees it, if ranks share the pack.

        With the exchange of heads it has all tokens for a part of the heads. With that of keys it
        has the keys of each part of a sequence whose queries the rank has: of one long sequence,
        all and a range more, as its early queries need the first keys once more.
        """
        work, shape, shards = self.work, self.shape, self.work.shards
        if shards == 1:
            return self
        whole = work.tokens * shards
        if work.exchange == "heads":
            kv_heads = max(1, shape.kv_heads // shards)
            shape = replace(shape, heads=shape.heads // shards, kv_heads=kv_heads)
            work = replace(work, tokens=whole, shards=1)
        else:
            work = replace(work, shards=1, keys=whole + work.tokens // 2)
        return replace(self, shape=shape, work=work)

    @property
    def element(self) -> int:
        """The bytes of one element of a weight or of an activation."""
        return self.form.element

    @property
    def tokens(self) -> int:
        """The tokens of the micro-batch."""
        return self.work.tokens

    @property
    def mlp_tile(self) -> Layer:
        """The layer with the tokens whose MLP is computed at once."""
        tokens = min(self.tokens, self.form.mlp_tile or self.tokens)
        whole = replace(self.form, mlp_tile=None)
        return replace(self, work=replace(self.work, tokens=tokens), form=whole)

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained."""
        return self.form.adapter is None

    @property
    def hidden(self) -> int:
        """The size of the residual stream."""
        return self.tokens * self.shape.hidden

    @property
    def queries(self) -> int:
        """The size of the queries of all heads."""
        return self.tokens * self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        """The size of the keys."""
        return self._key_tokens * self.shape.kv_heads * self.shape.head_dim

    @property
    def values(self) -> int:
        """The size of the values; as large as the keys but in latent attention."""
        return self._key_tokens * self.shape.kv_heads * self.shape.value_dim

    @property
    def gathered(self) -> int:
        """The size of the keys and values of all ranks that share the pack."""
        return self.work.shards * (self.keys + self.values)

    @property
    def _key_tokens(self) -> int:
        return self.tokens if self.work.keys is None else self.work.keys

    @property
    def expanded(self) -> int:
        """The size of what latent attention makes of its narrow vector: values, and keys' parts."""
        rotary = self.shape.latent.rotary if self.shape.latent else 0
        return self.keys + self.values - self.tokens * self.shape.kv_heads * rotary

    @property
    def attended(self) -> int:
        """The size of attention's output."""
        return self.tokens * self.shape.heads * self.shape.value_dim

    @property
    def attended_keys(self) -> int:
        """The size of the keys that attention gets, repeated for query heads if so."""
        return int(self.keys + self.keys * self._more_heads * self._repeated_share)

    @property
    def attended_values(self) -> int:
        """The size of the values that attention gets, as of `attended_keys`."""
        return int(self.values + self.values * self._more_heads * self._repeated_share)

    @property
    def _more_heads(self) -> int:
        """How many further query heads read a key head."""
        return self.shape.heads // self.shape.kv_heads - 1

    @property
    def longest_repeated(self) -> int:
        """The size of the longest sequence's repeated keys; the values have the same size."""
        tokens = self._repeated_share * self.work.longest
        return int(tokens * self.shape.heads * self.shape.head_dim)

    @property
    def gathered_keys(self) -> int:
        """The size of the copies of shared tokens' keys and values for further sequences."""
        if self.has_cpu_kernel:
            return 0
        by_sequence = self.form.attention == "sdpa"
        more = (self.shape.heads - self.shape.kv_heads) * self._repeated_share
        again = 2 * (self.shape.kv_heads + more) + 1.5 * self.shape.heads * by_sequence
        return int(self.work.shared * again * self.shape.head_dim)

    @property
    def result_factor(self) -> int:
        """The factor by which an expert's result grows if it is multiplied by an fp32 weight."""
        return FP32 // self.element if self.shape.traits.fp32_routing else 1

    @property
    def expert_rank_bytes(self) -> int:
        """The bytes of a row of the rank for each token and expert; 0 without their adapter."""
        adapter = self.form.adapter
        if adapter is None or not self.form.adapts(EXPERTS):
            return 0
        return adapter.element * adapter.rank * self.tokens * self.shape.experts_per_token

    @property
    def post_norm_gradient(self) -> int:
        """The size of the gradient of a norm after a block; 0 in families without such norms."""
        return self.hidden if self.shape.traits.post_norms else 0

    @property
    def has_fused_norms(self) -> bool:
        """Whether norms are fused; a fused norm keeps its input unchanged."""
        return self.shape.traits.norms in _FUSED_NORMS[self.form.fused]

    @property
    def has_fused_gates(self) -> bool:
        """Whether gated MLPs are fused; only Liger's kernels fuse Gemma's, which use GELU."""
        return self.has_fused_norms and any(self.select_linears(("gate_proj",)))

    def norm_block(self, elements: int) -> int:
        """Return how many of a norm's elements are in fp32 at once."""
        return self.fused_block(elements) if self.has_fused_norms else elements

    def fused_block(self, elements: int) -> int:
        """Return the elements that a fused step holds besides its results; 0 with Liger's."""
        in_blocks = self.form.fused == "own"
        return min(elements, BLOCK_ELEMENTS[self.form.device]) if in_blocks else 0

    def saves_input(self, names: tuple[str, ...]) -> bool:
        """Return whether any of these linears saves its input unchanged."""
        adapter = self.form.adapter
        if adapter is None:
            return True
        copied = adapter.dropout or adapter.element > self.element
        return not copied and any(self.adapted_linears(names))

    def trained_elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of these linears' weights that are trained, in one layer."""
        adapter = self.form.adapter
        if adapter is None:
            return sum(lin.inputs * lin.outputs for lin in self.select_linears(names))
        adapted = self.adapted_linears(names)
        return sum(adapter.rank * (lin.inputs + lin.outputs) for lin in adapted)

    def largest_weight(self, names: tuple[str, ...]) -> int:
        """Return the number of elements of the largest weight among these linears."""
        return max((lin.inputs * lin.outputs for lin in self.select_linears(names)), default=0)

    def dequantised_bytes(self, names: tuple[str, ...]) -> int:
        """Return the bytes of the largest of these weights, dequantised; 0 if not quantised."""
        return self.element * self.largest_weight(names) if self.form.quantized else 0

    def adapted_linears(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Return the linears of these names that have an adapter, without stacked experts."""
        return (linear for linear in self.select_linears(names) if self.form.adapts(linear.name))

    def select_linears(self, names: tuple[str, ...]) -> Iterator[Linear]:
        """Return linears of these names, without stacked experts."""
        return (lin for lin in self.shape.linears if lin.name in names and lin.stacked == 1)

    @property
    def mask_bytes(self) -> int:
        """The bytes of the masks of packed attention, which all layers share (model/attention.py).

        A sequence needs a mask if it is longer than the window, shares tokens with another, or has
        softcapped scores or attention sinks. The mask has a number for each query and key. Other
        sequences use a kernel's own causal mask.
        """
        softcapped = self.shape.softcapped
        if (self.form.attention != "sdpa" and not softcapped) or self.has_cpu_kernel:
            return 0
        in_parts = self.work.keys is not None
        full = softcapped or self._masks_sinks or self.work.shared > 0 or in_parts
        kinds = full + self._is_windowed
        return kinds * self.element * self.tokens * self.work.longest

    @property
    def aligned_mask_bytes(self) -> int:
        """The bytes of a card kernel's aligned copy of the masks, averaged over all layers."""
        if not self._has_card_kernel or self.writes_scores:
            return 0
        masks = self.element * self.tokens * self.work.longest
        return masks * self._masked_layers // self.shape.layers

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether the CPU's kernel for whole packs is used (model/cpu.py)."""
        plain = not self.shape.softcapped and not self._is_windowed
        return self._is_cpu_sdpa and plain and self.shape.latent is None

    @property
    def writes_scores(self) -> bool:
        """Whether attention's scores are held in memory, because no kernel takes its tensors.

        PyTorch's kernel for CPUs takes no values of another width than the keys.
        """
        return self.form.writes_scores or (self._is_cpu_sdpa and self.shape.latent is not None)

    @property
    def _is_cpu_sdpa(self) -> bool:
        return self.form.device == "cpu" and self.form.attention == "sdpa"

    @property
    def _repeated_share(self) -> float:
        """The share of layers whose kernel gets keys and values repeated for every query head."""
        if not self._has_card_kernel or self.shape.heads == self.shape.kv_heads:
            return 0.0
        return self._masked_layers / self.shape.layers if self.form.flash else 1.0

    @property
    def _has_card_kernel(self) -> bool:
        form = self.form
        return form.attention == "sdpa" and not self.shape.softcapped and form.device != "cpu"

    @property
    def _masked_layers(self) -> int:
        if self.work.shared or self._masks_sinks or self.work.keys is not None:
            return self.shape.layers
        return self.shape.sliding_layers if self._is_windowed else 0

    @property
    def _masks_sinks(self) -> bool:
        """Whether sdpa computes sinks, as keys that a mask shows to every query."""
        return self.shape.traits.sinks and self._has_card_kernel

    @property
    def _is_windowed(self) -> bool:
        window = self.shape.sliding_window
        return window is not None and self.work.longest > window


@dataclass(frozen=True)
class LayerStep:
    """One step of a layer. Numbers are bytes.

    Attributes:
        part: the name under which its bytes are listed.
        saved: what its forward keeps for its backward.
        scratch: what its backward allocates while `saved` still exists.
        gradient: a weight's gradient that exists at the same time.
        forward: what its forward allocates, if that may be the highest point.
    """

    part: str
    saved: int
    scratch: int
    gradient: int = 0
    forward: int = 0


@dataclass(frozen=True)
class Summit:
    """The highest point of a layer in bytes: the step, and what all steps have saved so far."""

    where: str
    saved: int
    scratch: int
    gradient: int

    @property
    def bytes(self) -> int:
        """The total bytes at that point."""
        return self.saved + self.scratch + self.gradient


def saved_bytes(steps: Iterable[LayerStep]) -> int:
    """Return the bytes that the steps together keep for their backward."""
    return sum(step.saved for step in steps)


def summit(steps: tuple[LayerStep, ...]) -> Summit:
    """Return the highest point of the steps' forward and backward."""
    return max(_points(steps), key=lambda point: point.bytes)


def _points(steps: tuple[LayerStep, ...]) -> Iterator[Summit]:
    saved = 0
    for step in steps:
        yield Summit(f"the forward of {step.part}", saved, step.forward, 0)
        saved += step.saved
        yield Summit(f"the backward of {step.part}", saved, step.scratch, step.gradient)
