"""Families with experts: the linears, routers and norms that a config.json makes.

Each follows its model in transformers (models/<family>/modeling_<family>.py), with the experts
named one by one as in the published weights. Routers are no linear layers there, so adapters and
quantisation pass them by.
"""

from __future__ import annotations

from plimsoll.shapes.config_fields import COUNT, WIDTH, Fields
from plimsoll.shapes.decoder_blocks import (
    Decoder,
    Experts,
    Sizes,
    attention,
    head_norms,
    layer_norms,
    mlp,
)
from plimsoll.shapes.shape import Linear, Tensors, Traits

_NAMES = ("gate_proj", "up_proj", "down_proj")


def mixtral(fields: Fields, sizes: Sizes) -> Decoder:
    """Experts in every layer, with the names w1 (gate), w3 (up) and w2 (down)."""
    experts = _experts(fields, "num_local_experts", sizes.intermediate, 0, sizes.layers)
    routed = _routed(sizes.hidden, experts, ("w1", "w3", "w2"))
    return Decoder((*attention(sizes), *routed), _others(sizes, experts), experts)


def qwen2_moe(fields: Fields, sizes: Sizes) -> Decoder:
    """A shared expert with a gate of its own."""
    width = fields.size("moe_intermediate_size", WIDTH)
    shared = fields.size("shared_expert_intermediate_size", WIDTH)
    experts = _experts(fields, "num_experts", width, shared, _sparse_layers(fields, sizes.layers))
    gate = Linear("shared_expert_gate", sizes.hidden, 1, False, experts.layers)
    linears = (*attention(sizes, fields.flag("qkv_bias")), *_mlps(sizes, experts), gate)
    return Decoder(linears, _others(sizes, experts), experts)


def qwen3_moe(fields: Fields, sizes: Sizes) -> Decoder:
    """Norms of queries and keys."""
    width = fields.size("moe_intermediate_size", WIDTH)
    renamed = "num_local_experts" in fields.values  # by transformers 5, as it saves a model
    number = "num_local_experts" if renamed else "num_experts"
    experts = _experts(fields, number, width, 0, _sparse_layers(fields, sizes.layers))
    bias = fields.flag("attention_bias")
    others = (*_others(sizes, experts), head_norms(sizes))
    linears = (*attention(sizes, bias, bias), *_mlps(sizes, experts))
    return Decoder(linears, others, experts, traits=Traits(query_norms=True))


def glm4_moe(fields: Fields, sizes: Sizes) -> Decoder:
    """The first layers dense, then experts with a shared one; without the layers that predict
    several tokens, which transformers does not load."""
    width = fields.size("moe_intermediate_size", WIDTH)
    shared = width * fields.size("n_shared_experts", COUNT)
    dense = fields.size("first_k_dense_replace", sizes.layers - 1, least=0)
    experts = _experts(fields, "n_routed_experts", width, shared, sizes.layers - dense)
    linears = (*attention(sizes, fields.flag("attention_bias")), *_mlps(sizes, experts))
    norms = (head_norms(sizes),) if fields.flag("use_qk_norm") else ()
    traits = Traits(query_norms=bool(norms), fp32_routing=True)
    return Decoder(linears, (*_others(sizes, experts), *norms), experts, traits=traits)


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
    """Of dense layers, routed experts and shared experts, all with the same names."""
    dense = mlp(sizes.hidden, sizes.intermediate, sizes.layers - experts.layers)
    shared = mlp(sizes.hidden, experts.shared_width, experts.layers if experts.shared_width else 0)
    return (*dense, *_routed(sizes.hidden, experts, _NAMES), *shared)


def _routed(hidden: int, experts: Experts, names: tuple[str, str, str]) -> tuple[Linear, ...]:
    gate, up, down = names
    number, count = experts.number, experts.layers * experts.number
    return (
        Linear(gate, hidden, experts.width, False, count, stacked=2 * number),
        Linear(up, hidden, experts.width, False, count, stacked=2 * number),
        Linear(down, experts.width, hidden, False, count, stacked=number),
    )


def _others(sizes: Sizes, experts: Experts) -> tuple[Tensors, Tensors]:
    """Norms and routers."""
    router = experts.number * sizes.hidden
    return (layer_norms(sizes, 2), Tensors(router, router * experts.layers))
