"""Families without experts: the linears and norms that a config.json makes.

Each follows its model in transformers (models/<family>/modeling_<family>.py); `qwen`, which
transformers does not have, follows modeling_qwen.py beside its published weights.
"""

from __future__ import annotations

from plimsoll.shapes.config_fields import Fields
from plimsoll.shapes.decoder_blocks import (
    Decoder,
    Sizes,
    attention,
    head_norms,
    layer_norms,
    mlp,
)
from plimsoll.shapes.shape import Linear, Tensors, Traits


def llama(fields: Fields, sizes: Sizes) -> Decoder:
    """Biases of attention and MLP as the file says."""
    bias = fields.flag("attention_bias")
    linears = (*attention(sizes, bias, bias), *_mlp(sizes, fields.flag("mlp_bias")))
    return Decoder(linears, (layer_norms(sizes, 2),))


def mistral(fields: Fields, sizes: Sizes) -> Decoder:
    """No biases."""
    return Decoder((*attention(sizes), *_mlp(sizes)), (layer_norms(sizes, 2),))


def qwen2(fields: Fields, sizes: Sizes) -> Decoder:
    """Biases of queries, keys and values."""
    return Decoder((*attention(sizes, qkv_bias=True), *_mlp(sizes)), (layer_norms(sizes, 2),))


def qwen3(fields: Fields, sizes: Sizes) -> Decoder:
    """Norms of queries and keys."""
    bias = fields.flag("attention_bias")
    linears = (*attention(sizes, bias, bias), *_mlp(sizes))
    norms = (layer_norms(sizes, 2), head_norms(sizes))
    return Decoder(linears, norms, traits=Traits(query_norms=True))


def gemma(fields: Fields, sizes: Sizes) -> Decoder:
    """As llama, without biases of the MLP."""
    bias = fields.flag("attention_bias")
    linears = (*attention(sizes, bias, bias), *_mlp(sizes))
    return Decoder(linears, (layer_norms(sizes, 2),), traits=Traits(norms="rms_fp32"))


def gemma2(fields: Fields, sizes: Sizes) -> Decoder:
    """Norms before and after attention and MLP."""
    bias = fields.flag("attention_bias")
    linears = (*attention(sizes, bias, bias), *_mlp(sizes))
    traits = Traits(norms="rms_fp32", post_norms=True)
    return Decoder(linears, (layer_norms(sizes, 4),), traits=traits)


def gemma3(fields: Fields, sizes: Sizes) -> Decoder:
    """As gemma2, with norms of queries and keys, and rotary tables for each kind of layer."""
    bias = fields.flag("attention_bias")
    linears = (*attention(sizes, bias, bias), *_mlp(sizes))
    traits = Traits(norms="rms_fp32", query_norms=True, post_norms=True, rotary_tables=2)
    return Decoder(linears, (layer_norms(sizes, 4), head_norms(sizes)), traits=traits)


def phi(fields: Fields, sizes: Sizes) -> Decoder:
    """Biases everywhere, an MLP of two matrices, layer norms (a weight and a bias each)."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    fc1, fc2 = (
        Linear("fc1", hidden, width, True, layers),
        Linear("fc2", width, hidden, True, layers),
    )
    linears = (*attention(sizes, qkv_bias=True, out_bias=True, out="dense"), fc1, fc2)
    norms = [Tensors(hidden, 2 * hidden * (layers + 1))]
    if fields.flag("qk_layernorm"):
        norms.append(Tensors(sizes.head_dim, 4 * sizes.head_dim * layers))
    traits = Traits(norms="layer", parallel=True)
    return Decoder(linears, tuple(norms), gated=False, head_bias=True, traits=traits)


def phi3(fields: Fields, sizes: Sizes) -> Decoder:
    """Queries, keys and values in one matrix, gate and up in one."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    linears = (
        Linear("qkv_proj", hidden, queries + 2 * keys, False, layers),
        Linear("o_proj", queries, hidden, False, layers),
        Linear("gate_up_proj", hidden, 2 * width, False, layers),
        Linear("down_proj", width, hidden, False, layers),
    )
    return Decoder(linears, (layer_norms(sizes, 2),))


def qwen(fields: Fields, sizes: Sizes) -> Decoder:
    """Queries, keys and values in one matrix with a bias; two modules are named c_proj."""
    layers, hidden, width = sizes.layers, sizes.hidden, sizes.intermediate
    inner, bias = sizes.heads * sizes.head_dim, not fields.flag("no_bias")
    linears = (
        Linear("c_attn", hidden, 3 * inner, True, layers),
        Linear("c_proj", inner, hidden, bias, layers),
        Linear("w1", hidden, width, bias, layers),
        Linear("w2", hidden, width, bias, layers),
        Linear("c_proj", width, hidden, bias, layers),
    )
    return Decoder(linears, (layer_norms(sizes, 2),))


def _mlp(sizes: Sizes, bias: bool = False) -> tuple[Linear, ...]:
    return mlp(sizes.hidden, sizes.intermediate, sizes.layers, bias)
