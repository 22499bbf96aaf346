"""The shape of a model, from its config.json alone: layers, linears, exact parameter counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A kind of linear layer of the decoder (never the head).

    Attributes:
        name: the last part of its module name, such as q_proj; adapters choose layers by it.
        count: the number of these layers in the model (for experts: layers times experts).
        stacked: the number of weight matrices that share one parameter tensor; 1 except for
            experts. transformers keeps the experts of a layer in two tensors: gate with up, and
            down.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    count: int
    stacked: int = 1

    @property
    def parameters(self) -> int:
        """The parameters of all layers of this kind together."""
        return self.count * (self.inputs * self.outputs + (self.outputs if self.bias else 0))


@dataclass(frozen=True)
class ParameterTensors:
    """Parameter tensors of one size: `elements` of each, `parameters` of all of them together."""

    elements: int
    parameters: int


@dataclass(frozen=True)
class Traits:
    """The properties of a family's code on which memory depends.

    Source: transformers 5, models/<family>/modeling_<family>.py.

    Attributes:
        norms: `rms` normalises in fp32 and multiplies by its weight in the model's dtype;
            `rms_fp32` multiplies in fp32 too; `layer` is PyTorch's layer norm.
        query_norms: queries and keys are normalised.
        post_norms: the outputs of attention and of the MLP are normalised, too.
        parallel: attention and MLP have the same input, the output of one norm; their outputs are
            added at the end.
        rotary_tables: the number of pairs of rotary tables.
        fp32_routing: experts' outputs are multiplied by fp32 weights, and so become fp32.
        clamped_experts: experts clamp gates and ups, which alternate in one tensor, and they and
            their router have biases; the router's softmax is over the chosen experts alone.
        sinks: attention has sinks (`model.sinks`).
    """

    norms: Literal["rms", "rms_fp32", "layer"] = "rms"
    query_norms: bool = False
    post_norms: bool = False
    parallel: bool = False
    rotary_tables: int = 1
    fp32_routing: bool = False
    clamped_experts: bool = False
    sinks: bool = False


PLAIN = Traits()


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are products of one narrow vector of a token.

    Attributes:
        width: the numbers of that vector (kv_lora_rank).
        queries: the numbers of the narrow vector that queries are products of (q_lora_rank); 0 if
            they are products of the hidden state.
        rotary: the dimensions of a query or key that are rotated; all heads share these of the key.
        values: the dimensions of a value; those of a query or key are `ModelShape.head_dim`.
    """

    width: int
    queries: int
    rotary: int
    values: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape.

    Attributes:
        name: the model's path or name.
        family: transformers' model_type.
        intermediate: the width of a dense layer's MLP.
        positions: max_position_embeddings; with longrope, the positions before its angles change.
        tied: whether the head is the embedding.
        gated: whether the MLP has a gate (three matrices, not two).
        experts: routed experts in a layer; 0 if every layer is dense.
        experts_per_token: routed experts that a token passes.
        expert_intermediate: the inner width of a routed expert.
        shared_intermediate: the inner width of the expert that every token passes; 0 without one.
        sliding_window: keys that a query sees in some layers; None if attention is full everywhere.
        sliding_layers: the number of layers with a window.
        linears: all kinds of linear layers of the decoder.
        other_tensors: norms, routers and all else that is neither linear, embedding nor head.
        head_bias: whether the output head has a bias.
        latent: the widths of latent attention; None for attention without it.
        softcapped: whether attention scores are bounded.
        logits_softcapped: whether logits are bounded.
        traits: the properties of the family's code on which memory depends.
        origin: where the shape is from: `described` in families.json; `counted` in the model that
            transformers builds, with activations as of the known families; `guessed` from the sizes
            in config.json, as of a Llama.
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
    other_tensors: tuple[ParameterTensors, ...] = ()
    latent: Latent | None = None
    softcapped: bool = False
    logits_softcapped: bool = False
    traits: Traits = PLAIN
    origin: Literal["described", "counted", "guessed"] = "described"

    @property
    def value_dim(self) -> int:
        """The dimensions of a value of one head."""
        return self.latent.values if self.latent else self.head_dim

    def cached_numbers(self, parallel: int = 1) -> int:
        """Return the numbers that a token adds to the KV cache of each of `parallel` cards.

        Cards divide the heads. Each card has the whole vector of latent attention.
        """
        if self.latent is not None:
            return self.layers * (self.latent.width + self.latent.rotary)
        return 2 * self.layers * -(-self.kv_heads // parallel) * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """The parameters of the output head and its bias; a tied matrix counts 0."""
        matrix = 0 if self.tied else self.vocabulary * self.hidden
        return matrix + (self.vocabulary if self.head_bias else 0)

    @property
    def other_parameters(self) -> int:
        """The parameters that are neither linear, embedding nor head."""
        return sum(tensors.parameters for tensors in self.other_tensors)

    @property
    def routers(self) -> ParameterTensors:
        """The routers, which have a row for each expert; 0 elements if every layer is dense."""
        experts = max((each.count for each in self.linears if each.stacked > 1), default=0)
        return ParameterTensors(self.hidden * self.experts, self.hidden * experts)

    @property
    def routing_bytes(self) -> int:
        """The bytes of the numbers of a token's experts in all layers (`records.ExpertNumbers`)."""
        return self.layers * self.experts_per_token * (1 if self.experts <= 255 else 2)

    @property
    def parameters(self) -> int:
        """The parameters of the causal language model; tied tensors count once."""
        return sum(tensors.parameters for tensors in parameter_tensors(self))

    @property
    def active_parameters(self) -> float:
        """The number of parameters with which one token is multiplied.

        Only the chosen experts count. The head counts, tied or not; the embedding does not.
        """
        chosen = self.experts_per_token / self.experts if self.experts else 1.0
        linears = sum(
            linear.parameters * (chosen if linear.stacked > 1 else 1.0) for linear in self.linears
        )
        return linears + self.embedding_parameters

    @property
    def value_parameters(self) -> int:
        """The parameters of the decoder with a value (or reward) head of one output as its head."""
        return sum(tensors.parameters for tensors in parameter_tensors(self, value=True))

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """The names of the linears that a low-rank adapter can wrap: all but stacked experts."""
        return tuple(dict.fromkeys(linear.name for linear in self.linears if linear.stacked == 1))

    @property
    def unstacked(self) -> ModelShape:
        """The shape with tensors as in a described family's files: most have each expert alone."""
        if self.traits.clamped_experts:
            return self
        return replace(self, linears=tuple(replace(each, stacked=1) for each in self.linears))

    @property
    def largest_parameter(self) -> int:
        """The elements of the largest single parameter tensor of the causal language model."""
        return max(tensors.elements for tensors in parameter_tensors(self))


def parameter_tensors(shape: ModelShape, value: bool = False) -> tuple[ParameterTensors, ...]:
    """Return all parameter tensors of the model as transformers holds them, grouped by size.

    If `value` is set, a value (or reward) head of one output replaces the output head.
    """
    table = shape.vocabulary * shape.hidden
    ends = [ParameterTensors(table, table if shape.tied or value else 2 * table)]
    if value:
        ends.append(ParameterTensors(shape.hidden, shape.hidden))
    elif shape.head_bias:
        ends.append(ParameterTensors(shape.vocabulary, shape.vocabulary))
    linears = [tensors for linear in shape.linears for tensors in _linear_tensors(linear)]
    return (*ends, *linears, *shape.other_tensors)


def _linear_tensors(linear: Linear) -> tuple[ParameterTensors, ...]:
    matrix = linear.inputs * linear.outputs
    weights = ParameterTensors(matrix * linear.stacked, matrix * linear.count)
    if not linear.bias:
        return (weights,)
    biases = ParameterTensors(linear.outputs * linear.stacked, linear.outputs * linear.count)
    return (weights, biases)


def small_parameters(shape: ModelShape, threshold: int, codes: int = 1, value: bool = False) -> int:
    """Return the total elements of the parameter tensors with at most `threshold` elements.

    These are norms and biases. ZeRO-3 does not divide them: every rank keeps full copies
    (`param_persistence_threshold`; DeepSpeed, runtime/zero/parameter_offload.py,
    mark_persistent_parameters).

    Args:
        shape: the model's shape.
        threshold: the most elements of a small tensor.
        codes: the number of 4-bit codes in one stored element of a linear layer; 1 if no layer is
            in 4 bits.
        value: see `parameter_tensors`.
    """
    small = sum(t.parameters for t in parameter_tensors(shape, value) if t.elements <= threshold)
    if codes == 1:
        return small
    coded = [_linear_tensors(linear)[0] for linear in shape.linears if linear.stacked == 1]
    small -= sum(t.parameters for t in coded if t.elements <= threshold)
    return small + sum(t.parameters // codes for t in coded if t.elements // codes <= threshold)


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of a rank's largest forward pass.

    Attributes:
        tokens: the rank's packed tokens of all sequences.
        sequences: the least number of sequences in the pack.
        longest: the tokens of the longest sequence.
        loss_tokens: the most tokens for which the head computes an output.
        shared: the most tokens of a first sequence that a second sequence attends to, too.
        shards: the ranks that share the pack.
        exchange: what they exchange for attention.
        keys: the keys that attention gets, if they are not those of `tokens`.
    """

    tokens: int
    sequences: int
    longest: int
    loss_tokens: int
    shared: int = 0
    shards: int = 1
    exchange: Literal["heads", "keys"] = "heads"
    keys: int | None = None
