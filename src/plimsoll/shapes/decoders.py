"""Read the fields of a decoder's config.json, and list its tensors: linears, norms and routers.

Each field is read with its type and bounds. Each family follows its model in transformers
(models/<family>/modeling_<family>.py), with one entry per expert as in the published weights.
transformers does not have `qwen`; it follows modeling_qwen.py from the published model. Routers
are not linear layers there, so adapters and quantisation do not apply to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from plimsoll.errors import ConfigError
from plimsoll.shapes.shape import PLAIN, Linear, ParameterTensors, Traits

COUNT = 4096
"""An upper bound for layers, heads and experts."""
WIDTH = 2**20
"""An upper bound for the width of a layer."""
LENGTH = 2**26
"""An upper bound for the vocabulary and the positions."""
_LONGROPE = ("longrope", "su")
"""Names of longrope in config.json; transformers uses the first."""


@dataclass(frozen=True)
class Fields:
    """A config.json with its family's defaults filled in.

    Attributes:
        source: the description of the file in messages.
        values: the value of each field.
    """

    source: str
    values: Mapping[str, object]

    def size(self, name: str, most: int, least: int = 1) -> int:
        """Return a field that is a whole number from `least` to `most`.

        Raises ConfigError if the field is missing, of another type or out of bounds.
        """
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"is not a whole number from {least} to {most:,}")
        return value

    def size_or_none(self, name: str, most: int) -> int | None:
        """Return a field that is a whole number, or None for null. Raises ConfigError as `size`."""
        return None if self._value(name) is None else self.size(name, most)

    def flag(self, name: str) -> bool:
        """Return a field that is true or false. Raises ConfigError for any other value."""
        value = self._value(name)
        if not isinstance(value, bool):
            raise self.error(name, "is not true or false")
        return value

    def list_or_none(self, name: str) -> list[object] | None:
        """Return a field that is a list or null (None). Raises ConfigError for any other value."""
        value = self._value(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "is not a list")
        return value

    def error(self, name: str, why: str) -> ConfigError:
        """Return the error for a field's value; `why` continues it, as "is not a list" does."""
        return ConfigError(
            f"{self.source}: {name} is {self.values[name]!r}, which {why}. "
            "Mend the file, or download the model again."
        )

    def _value(self, name: str) -> object:
        if name not in self.values:
            raise ConfigError(
                f"{self.source}: {name} is missing. Add it, or download the model again."
            )
        return self.values[name]


def longrope_positions(config: Mapping[str, object]) -> int | None:
    """Return the longest sequence that uses longrope's short factors; None without longrope.

    In a longer sequence the angles of all positions change; see `model.checks.check_length`. Only
    Phi-3 has this field outside of its rope settings.
    """
    name, most = "original_max_position_embeddings", config.get("max_position_embeddings")
    original, rope = config.get(name), config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _LONGROPE:
        original = original or rope.get(name)
    if isinstance(original, int) and isinstance(most, int) and original < most:
        return original
    return None


_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Sizes:
    """The sizes that every family has. `intermediate` is the inner width of a dense layer's MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture; all 0 for a dense model.

    Attributes:
        number: routed experts in a layer.
        per_token: routed experts that a token passes.
        width: the inner width of a routed expert.
        shared_width: the inner width of the expert that every token passes; 0 without one.
        layers: layers that have experts; the other layers are dense.
    """

    number: int
    per_token: int
    width: int
    shared_width: int
    layers: int


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a family's decoder. `others` are neither linear, embedding nor head."""

    linears: tuple[Linear, ...]
    others: tuple[ParameterTensors, ...]
    experts: Experts = Experts(0, 0, 0, 0, 0)
    gated: bool = True
    head_bias: bool = False
    traits: Traits = PLAIN


def attention(
    sizes: Sizes, qkv_bias: bool = False, out_bias: bool = False, out: str = "o_proj"
) -> tuple[Linear, ...]:
    """Return the four linears of attention: q_proj, k_proj, v_proj and the output named `out`."""
    hidden, layers = sizes.hidden, sizes.layers
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return (
        Linear("q_proj", hidden, queries, qkv_bias, layers),
        Linear("k_proj", hidden, keys, qkv_bias, layers),
        Linear("v_proj", hidden, keys, qkv_bias, layers),
        Linear(out, queries, hidden, out_bias, layers),
    )


def mlp(
    hidden: int,
    width: int,
    count: int,
    bias: bool = False,
    names: tuple[str, str, str] = _GATED,
    experts: int = 0,
) -> tuple[Linear, ...]:
    """Return the linears gate, up and down (with these `names`) of `count` gated MLPs.

    `experts` is the number of experts whose weights a layer stacks into one tensor; 0: none.
    """
    gate, up, down = names
    kinds = (
        Linear(gate, hidden, width, bias, count, stacked=2 * experts or 1),
        Linear(up, hidden, width, bias, count, stacked=2 * experts or 1),
        Linear(down, width, hidden, bias, count, stacked=experts or 1),
    )
    return kinds if count else ()


def layer_norms(sizes: Sizes, per_layer: int) -> ParameterTensors:
    """Return the weights of all layers' RMS norms and of the norm before the head."""
    return ParameterTensors(sizes.hidden, sizes.hidden * (per_layer * sizes.layers + 1))


def head_norms(sizes: Sizes) -> ParameterTensors:
    """Return the weights of the RMS norms of queries and keys, in all layers."""
    return ParameterTensors(sizes.head_dim, sizes.head_dim * 2 * sizes.layers)


def llama(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Llama; config.json says whether attention and MLP have biases."""
    bias = fields.flag("attention_bias")
    linears = _gated_linears(sizes, bias, bias, fields.flag("mlp_bias"))
    return DecoderParts(linears, (layer_norms(sizes, 2),))


def mistral(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Mistral: no biases."""
    return DecoderParts(_gated_linears(sizes), (layer_norms(sizes, 2),))


def qwen2(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Qwen2: biases of queries, keys and values."""
    return DecoderParts(_gated_linears(sizes, qkv_bias=True), (layer_norms(sizes, 2),))


def with_traits(fields: Fields, sizes: Sizes, traits: Traits) -> DecoderParts:
    """Return the parts of a gated decoder whose norms follow from `traits`.

    config.json says whether attention has biases.
    """
    bias = fields.flag("attention_bias")
    norms = (layer_norms(sizes, 4 if traits.post_norms else 2),)
    of_heads = (head_norms(sizes),) if traits.query_norms else ()
    return DecoderParts(_gated_linears(sizes, bias, bias), (*norms, *of_heads), traits=traits)


qwen3 = partial(with_traits, traits=Traits(query_norms=True))
gemma = partial(with_traits, traits=Traits(norms="rms_fp32"))
gemma2 = partial(with_traits, traits=Traits(norms="rms_fp32", post_norms=True))
gemma3 = partial(
    with_traits,  # two rotary tables: one for each kind of layer
    traits=Traits(norms="rms_fp32", query_norms=True, post_norms=True, rotary_tables=2),
)


def _gated_linears(
    sizes: Sizes, qkv_bias: bool = False, out_bias: bool = False, mlp_bias: bool = False
) -> tuple[Linear, ...]:
    gated = mlp(sizes.hidden, sizes.intermediate, sizes.layers, mlp_bias)
    return (*attention(sizes, qkv_bias, out_bias), *gated)


def phi(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Phi: biases everywhere (also in norms), and an MLP of two matrices."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    linears = (
        *attention(sizes, qkv_bias=True, out_bias=True, out="dense"),
        Linear("fc1", hidden, width, True, layers),
        Linear("fc2", width, hidden, True, layers),
    )
    norms = [ParameterTensors(hidden, 2 * hidden * (layers + 1))]
    if fields.flag("qk_layernorm"):
        norms.append(ParameterTensors(sizes.head_dim, 4 * sizes.head_dim * layers))
    traits = Traits(norms="layer", parallel=True)
    return DecoderParts(linears, tuple(norms), gated=False, head_bias=True, traits=traits)


def phi3(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Phi-3: one matrix for queries, keys and values, one for gate and up."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    linears = (
        Linear("qkv_proj", hidden, queries + 2 * keys, False, layers),
        Linear("o_proj", queries, hidden, False, layers),
        Linear("gate_up_proj", hidden, 2 * width, False, layers),
        Linear("down_proj", width, hidden, False, layers),
    )
    return DecoderParts(linears, (layer_norms(sizes, 2),))


def qwen(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Qwen 1: one matrix with a bias for queries, keys and values."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    inner, bias = sizes.heads * sizes.head_dim, not fields.flag("no_bias")
    linears = (
        Linear("c_attn", hidden, 3 * inner, True, layers),
        Linear("c_proj", inner, hidden, bias, layers),
        Linear("w1", hidden, width, bias, layers),
        Linear("w2", hidden, width, bias, layers),
        Linear("c_proj", width, hidden, bias, layers),
    )
    return DecoderParts(linears, (layer_norms(sizes, 2),))


def mixtral(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Mixtral: experts in every layer, with the names w1, w3 and w2."""
    experts = _experts(fields, "num_local_experts", sizes.intermediate, 0, sizes.layers)
    routed = _routed_linears(sizes, experts, ("w1", "w3", "w2"))
    return DecoderParts((*attention(sizes), *routed), _norms_and_routers(sizes, experts), experts)


def qwen2_moe(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Qwen2-MoE: routed experts, and a shared expert with a gate."""
    width = fields.size("moe_intermediate_size", WIDTH)
    shared = fields.size("shared_expert_intermediate_size", WIDTH)
    experts = _experts(fields, "num_experts", width, shared, _sparse_layers(fields, sizes.layers))
    gate = Linear("shared_expert_gate", sizes.hidden, 1, False, experts.layers)
    linears = (*attention(sizes, fields.flag("qkv_bias")), *_mlps(sizes, experts), gate)
    return DecoderParts(linears, _norms_and_routers(sizes, experts), experts)


def qwen3_moe(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a Qwen3-MoE: routed experts, and norms of queries and keys."""
    width = fields.size("moe_intermediate_size", WIDTH)
    renamed = "num_local_experts" in fields.values  # transformers 5 saves the field so
    name = "num_local_experts" if renamed else "num_experts"
    experts = _experts(fields, name, width, 0, _sparse_layers(fields, sizes.layers))
    bias = fields.flag("attention_bias")
    others = (*_norms_and_routers(sizes, experts), head_norms(sizes))
    linears = (*attention(sizes, bias, bias), *_mlps(sizes, experts))
    return DecoderParts(linears, others, experts, traits=Traits(query_norms=True))


def glm4_moe(fields: Fields, sizes: Sizes) -> DecoderParts:
    """Return the parts of a GLM-4-MoE: dense layers, then layers with routed and shared experts.

    Layers for multi-token prediction are left out: transformers does not load them.
    """
    width = fields.size("moe_intermediate_size", WIDTH)
    shared = width * fields.size("n_shared_experts", COUNT)
    dense = fields.size("first_k_dense_replace", sizes.layers - 1, least=0)
    experts = _experts(fields, "n_routed_experts", width, shared, sizes.layers - dense)
    linears = (*attention(sizes, fields.flag("attention_bias")), *_mlps(sizes, experts))
    norms = (head_norms(sizes),) if fields.flag("use_qk_norm") else ()
    traits = Traits(query_norms=bool(norms), fp32_routing=True)
    return DecoderParts(
        linears, (*_norms_and_routers(sizes, experts), *norms), experts, traits=traits
    )


def _experts(fields: Fields, name: str, width: int, shared_width: int, layers: int) -> Experts:
    number = fields.size(name, COUNT)
    per_token = fields.size("num_experts_per_tok", number)
    return Experts(number, per_token, width, shared_width, layers)


def _sparse_layers(fields: Fields, layers: int) -> int:
    step = fields.size("decoder_sparse_step", layers)
    dense = fields.list_or_none("mlp_only_layers") or []
    sparse = sum(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if sparse == 0:
        raise fields.error("mlp_only_layers", "leaves no layer with experts")
    return sparse


def _mlps(sizes: Sizes, experts: Experts) -> tuple[Linear, ...]:
    """Return the MLP linears of dense layers, routed experts and shared experts."""
    dense = mlp(sizes.hidden, sizes.intermediate, sizes.layers - experts.layers)
    shared = mlp(sizes.hidden, experts.shared_width, experts.layers if experts.shared_width else 0)
    return (*dense, *_routed_linears(sizes, experts), *shared)


def _routed_linears(
    sizes: Sizes, experts: Experts, names: tuple[str, str, str] = _GATED
) -> tuple[Linear, ...]:
    number, count = experts.number, experts.layers * experts.number
    return mlp(sizes.hidden, experts.width, count, names=names, experts=number)


def _norms_and_routers(sizes: Sizes, experts: Experts) -> tuple[ParameterTensors, ParameterTensors]:
    router = experts.number * sizes.hidden
    return (layer_norms(sizes, 2), ParameterTensors(router, router * experts.layers))
