"""Describe a forward and backward pass as far as its memory depends on it, and count parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import AdapterConfig, ModelConfig, TrainedRole
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.resolve.decisions import Capability, against_varlen
from plimsoll.resolve.roles import HeadKind
from plimsoll.shapes.shape import ModelShape

EMBEDDINGS = "embed_tokens"
"""The input embedding, as an adapter's target; it is no linear layer."""


def trained_parameters(role: TrainedRole, shape: ModelShape, head: HeadKind) -> int:
    """Return the number of trained parameters: all, or those of the adapter and a value head."""
    if role.adapter is None:
        whole = shape.value_parameters if head == "value" else shape.parameters
        return whole - frozen_parameters(role, shape)
    whole = sum(whole_tensors(shape, role.adapter))
    return (
        adapter_parameters(shape, role.adapter) + whole + (shape.hidden if head == "value" else 0)
    )


def frozen_parameters(role: TrainedRole, shape: ModelShape) -> int:
    """Return the number of parameters that a role without an adapter leaves as they are."""
    return shape.routers.parameters if role.freeze == "router" else 0


def adapter_parameters(shape: ModelShape, adapter: AdapterConfig) -> int:
    """Return the number of an adapter's parameters: all matrices, and DoRA's magnitudes."""
    return sum(count * elements for count, elements in adapter_tensors(shape, adapter))


def adapter_tensors(shape: ModelShape, adapter: AdapterConfig) -> list[tuple[int, int]]:
    """Return (count, elements of each) for the matrices of an adapter and DoRA's magnitudes."""
    tensors = []
    for linear in shape.linears:
        if linear.stacked == 1 and ({linear.name, "all-linear"} & {*adapter.targets}):
            sides = [linear.inputs, linear.outputs]
            tensors += [(linear.count, adapter.rank * side) for side in sides]
            tensors += [(linear.count, linear.outputs)] if adapter.dora else []
    if EMBEDDINGS in adapter.targets:
        tensors += [(1, adapter.rank * side) for side in (shape.vocabulary, shape.hidden)]
        tensors += [(1, shape.hidden)] if adapter.dora else []
    return tensors


def whole_tensors(shape: ModelShape, adapter: AdapterConfig) -> list[int]:
    """Return the elements of each tensor that is trained whole beside an adapter."""
    names = adapter.modules_to_save
    tables = min(len(names), 1) if shape.tied else len(names)
    bias = [shape.vocabulary] if shape.head_bias and "lm_head" in names else []
    return [shape.embedding_parameters] * tables + bias


Attention = Literal["varlen", "sdpa", "eager"]
"""The way in which attention is computed.

varlen: one flash kernel for the pack (FlashAttention-2 too). sdpa: a kernel per sequence. eager:
plain products that hold the scores.
"""

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""fp32 elements of softmaxes and fused norms that exist at once, as in model/logit_chunks.py."""

Fused = Literal["none", "own", "liger"]
"""The origin of norms and gated MLPs: transformers, model/fused.py or model/liger.py."""


@dataclass(frozen=True)
class ChunkedHead:
    """The head of `token_logprobs`, with logits of `rows` learned tokens at once.

    `entropy` says whether entropies are computed too; `scaled`, whether the logits are divided by a
    temperature other than 1.
    """

    rows: int
    entropy: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class UnfusedHead:
    """A head that computes the logits of every token at once, and the loss in fp32.

    Models in transformers have it.

    Plimsoll has no such head; other systems' runs are priced with it (benchmarks/peak_models.py).
    """


@dataclass(frozen=True)
class ScalarHead:
    """A head that computes a number for each learned token, in fp32."""


@dataclass(frozen=True)
class TeacherHead:
    """The head of `distil`, with a student's and a teacher's logits of `rows` learned tokens.

    `hidden` and `element` are the teacher's hidden size and the bytes of its weights.
    """

    rows: int
    hidden: int
    element: int


@dataclass(frozen=True)
class NoHead:
    """No head: a teacher returns hidden states, and its head runs with the student's."""


Head = ChunkedHead | UnfusedHead | ScalarHead | TeacherHead | NoHead


@dataclass(frozen=True)
class AdapterForm:
    """A low-rank adapter.

    Attributes:
        rank: the inner width.
        targets: last parts of module names, or ("all-linear",).
        element: bytes of a weight; if they exceed the model's, each adapted linear casts its input.
        dropout: whether the input has dropout.
        dora: whether magnitudes are learned too.
        whole: modules that are trained whole.
    """

    rank: int
    targets: tuple[str, ...]
    element: int
    dropout: bool = False
    dora: bool = False
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class ActivationForm:
    """The form of a forward and backward pass.

    Attributes:
        element: bytes of a weight and of an activation (2 in bfloat16).
        checkpoint_every: None keeps all activations; k checkpoints the first of every k layers,
            which keep their input and recompute the rest.
        attention: how attention is computed.
        head: how the head is computed.
        trained: forward and backward; else forward only, without autograd.
        adapter: None trains all weights; else only the adapter.
        quantized: linear weights are in 4 bits, and dequantised one at a time.
        selective: checkpointed layers keep the results of matrix products and attention too.
        inputs_on_host: the inputs of checkpointed layers are moved to pinned host memory.
        device: where the model runs.
        fused: whose norms and gated MLPs are used, if they know the family's.
        flash: whether sdpa on a card uses the flash kernel without a mask; other kernels get keys
            and values repeated for every head (model/attention.py).
        kernels: whether any kernel of sdpa on a card takes the model's dtype; else the scores of
            one sequence at a time are held, in fp32.
        mlp_tile: tokens whose MLP is computed at once; None: all of the micro-batch.
        trains_routers: whether routers learn if all else does.
    """

    element: int
    checkpoint_every: int | None
    attention: Attention
    head: Head
    trained: bool
    adapter: AdapterForm | None = None
    quantized: bool = False
    selective: bool = False
    inputs_on_host: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    fused: Fused = "none"
    flash: bool = True
    kernels: bool = True
    mlp_tile: int | None = None
    trains_routers: bool = True

    @property
    def writes_scores(self) -> bool:
        """Whether attention's scores are held in memory, because no kernel takes the dtype."""
        return self.attention == "sdpa" and self.device != "cpu" and not self.kernels

    def trains(self, module: Literal["embed_tokens", "lm_head"], tied: bool) -> bool:
        """Return whether the embedding or the head is trained; `tied`: they are one tensor."""
        whole = self.adapter.whole if self.adapter else None
        return self.trained and (whole is None or module in whole or (tied and bool(whole)))

    def adapts(self, linear: str) -> bool:
        """Return whether a linear layer of that name has an adapter."""
        targets = self.adapter.targets if self.adapter else ()
        return linear in targets or "all-linear" in targets


def activation_form(
    model: ModelConfig,
    adapter: AdapterConfig | None,
    shape: ModelShape,
    head: HeadKind,
    device: Device,
    entropy: bool,
    scaled: bool,
    capability: Capability | None = None,
) -> ActivationForm:
    """Return the form in which a role is trained; parameters: see `trained_role` and `RoleWork`."""
    pair = None
    if adapter is not None:
        dropout = adapter.dropout > 0
        pair = AdapterForm(
            adapter.rank,
            adapter.targets,
            model.element,
            dropout,
            adapter.dora,
            adapter.modules_to_save,
        )
    heads: dict[HeadKind, Head] = {
        "policy": ChunkedHead(model.head_chunk, entropy, scaled),
        "value": ScalarHead(),
        "states": NoHead(),
    }
    return ActivationForm(
        element=model.element,
        checkpoint_every=model.checkpoint_every if model.gradient_checkpointing else None,
        attention=cast(Attention, model.attention),
        head=heads[head],
        trained=True,
        adapter=pair,
        quantized=model.quantization != "none",
        selective=model.gradient_checkpointing == "selective",
        inputs_on_host=model.activation_offload == "cpu" and device == "cuda",
        device=device,
        fused=cast(Fused, model.kernels),
        flash=not any(against_varlen(device, capability, model.dtype, False, shape.head_dim)),
        kernels=has_kernels(capability, model.dtype),
        mlp_tile=model.mlp_tile,
    )


def has_kernels(capability: Capability | None, dtype: str) -> bool:
    """Return whether PyTorch has an attention kernel for a card and dtype.

    On cards without units for bfloat16, sdp_utils.cpp takes float16 and float32 alone
    (`less_than_sm80_mem_efficient_dtypes`). Parameters as of `against_varlen`.
    """
    return dtype != "bfloat16" or capability is None or capability >= BFLOAT16_UNITS
