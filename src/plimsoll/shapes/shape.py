"""What a model is made of, from its config.json alone: layers, linears, exact parameter counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A kind of linear layer of the decoder (never the head).

    name: the last part of its module name, such as q_proj; adapters choose by it.
    count: how many of them the whole model has (layers, times experts where it is an expert's).
    stacked: how many of their weights share one parameter tensor. 1, but for experts: transformers
        keeps all of a layer's as two tensors, gate with up and down by itself.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    count: int
    stacked: int = 1

    @property
    def parameters(self) -> int:
        """Of all of them together."""
        return self.count * (self.inputs * self.outputs + (self.outputs if self.bias else 0))


@dataclass(frozen=True)
class Tensors:
    """Parameter tensors of one size. elements: of each. parameters: of all of them together."""

    elements: int
    parameters: int


@dataclass(frozen=True)
class Traits:
    """How a family's code computes, as far as memory depends on it (transformers 5,
    models/<family>/modeling_<family>.py).

    norms: `rms` computes in fp32 and multiplies by its weight in the model's dtype, `rms_fp32` does
    that in fp32 too; `layer` is PyTorch's layer norm. query_norms: queries and keys have norms of
    their own. post_norms: a norm reads what attention and MLP give. parallel: attention and MLP
    read one norm, and are added at the end. rotary_tables: pairs of them. fp32_routing: experts'
    results are multiplied with fp32 weights, and so become fp32.
    """

    norms: Literal["rms", "rms_fp32", "layer"] = "rms"
    query_norms: bool = False
    post_norms: bool = False
    parallel: bool = False
    rotary_tables: int = 1
    fp32_routing: bool = False


PLAIN = Traits()


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape.

    family: transformers' model_type. positions: max_position_embeddings; of a longrope, those
    before it changes.
    intermediate: of a dense layer's MLP. experts: 0 where every layer is dense.
    tied: the head is the embedding. sliding_window: None where attention is full everywhere.
    linears: all kinds of linear layers of the decoder. other_tensors: norms, routers and whatever
    else is neither linear, embedding nor head. gated: the MLP has a gate (three matrices, not two).
    shared_intermediate: of the expert that sees every token; 0 where there is none. sliding_layers:
    those with a window. head_bias: the output head has a bias. softcapped, logits_softcapped:
    attention scores are bounded, logits are.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    gated: bool
    experts: int
    experts_per_token: int
    expert_intermediate: int
    sliding_window: int | None
    linears: tuple[Linear, ...]
    shared_intermediate: int = 0
    sliding_layers: int = 0
    head_bias: bool = False
    other_tensors: tuple[Tensors, ...] = ()
    softcapped: bool = False
    logits_softcapped: bool = False
    traits: Traits = PLAIN

    @property
    def embedding_parameters(self) -> int:
        """Of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output head and its bias; its matrix counts 0 where it is the embedding."""
        matrix = 0 if self.tied else self.vocabulary * self.hidden
        return matrix + (self.vocabulary if self.head_bias else 0)

    @property
    def linear_parameters(self) -> int:
        """Of all linear layers of the decoder."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def other_parameters(self) -> int:
        """Of what is neither linear, embedding nor head."""
        return sum(tensors.parameters for tensors in self.other_tensors)

    @property
    def parameters(self) -> int:
        """Of the causal language model, tied tensors once."""
        return self.value_parameters - self.hidden + self.head_parameters

    @property
    def active_parameters(self) -> float:
        """Those that a token is multiplied with: of experts only the chosen, the head, tied or not,
        and no embedding."""
        chosen = self.experts_per_token / self.experts if self.experts else 1.0
        linears = sum(
            linear.parameters * (chosen if linear.stacked > 1 else 1.0) for linear in self.linears
        )
        return linears + self.embedding_parameters

    @property
    def value_parameters(self) -> int:
        """Of the same decoder with a value (or reward) head of one label instead of the head."""
        decoder = self.embedding_parameters + self.linear_parameters + self.other_parameters
        return decoder + self.hidden

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Names of the linears that a low-rank adapter can wrap: all but stacked experts."""
        return tuple(dict.fromkeys(linear.name for linear in self.linears if linear.stacked == 1))

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest single parameter tensor of the causal language model."""
        return max(tensors.elements for tensors in parameter_tensors(self))


def parameter_tensors(shape: ModelShape, value: bool = False) -> tuple[Tensors, ...]:
    """All parameter tensors of the causal language model as transformers holds them, by size.

    value: of the same decoder with a value (or reward) head of one label instead of the head.
    """
    table = shape.vocabulary * shape.hidden
    ends = [Tensors(table, table if shape.tied or value else 2 * table)]
    if value:
        ends.append(Tensors(shape.hidden, shape.hidden))
    elif shape.head_bias:
        ends.append(Tensors(shape.vocabulary, shape.vocabulary))
    linears = [tensors for linear in shape.linears for tensors in _linear_tensors(linear)]
    return (*ends, *linears, *shape.other_tensors)


def _linear_tensors(linear: Linear) -> tuple[Tensors, ...]:
    matrix = linear.inputs * linear.outputs
    weights = Tensors(matrix * linear.stacked, matrix * linear.count)
    if not linear.bias:
        return (weights,)
    return (weights, Tensors(linear.outputs, linear.outputs * linear.count))


def small_parameters(shape: ModelShape, threshold: int, codes: int = 1, value: bool = False) -> int:
    """Elements of all parameter tensors of at most `threshold` elements: norms, biases and such.

    ZeRO-3 keeps these whole on every rank (`param_persistence_threshold`; DeepSpeed,
    runtime/zero/parameter_offload.py, mark_persistent_parameters).

    codes: how many 4-bit codes of a linear layer share one stored element; 1: none is in 4 bits.
    value: as for `parameter_tensors`.
    """
    small = sum(t.parameters for t in parameter_tensors(shape, value) if t.elements <= threshold)
    if codes == 1:
        return small
    coded = [_linear_tensors(linear)[0] for linear in shape.linears if linear.stacked == 1]
    small -= sum(t.parameters for t in coded if t.elements <= threshold)
    return small + sum(t.parameters // codes for t in coded if t.elements // codes <= threshold)


@dataclass(frozen=True)
class MicroBatch:
    """The largest forward of a rank.

    tokens: packed, in all. sequences: how many at least share them. longest: tokens of the
    longest one. learned: tokens that the head sees at most. shared: tokens that a second sequence
    attends to, at most.
    """

    tokens: int
    sequences: int
    longest: int
    loss_tokens: int
    shared: int = 0
