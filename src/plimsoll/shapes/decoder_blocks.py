"""What decoders are built of: linears and norms of attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.shapes.shape import PLAIN, Linear, Tensors, Traits


@dataclass(frozen=True)
class Sizes:
    """What every family has. intermediate: the width of a dense layer's MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class Experts:
    """number, width: of the routed experts. shared_width: of the one that sees every token.

    layers: those that have experts; the rest are dense.
    """

    number: int
    per_token: int
    width: int
    shared_width: int
    layers: int


@dataclass(frozen=True)
class Decoder:
    """What a family makes of a config.json. others: neither linear, embedding nor head."""

    linears: tuple[Linear, ...]
    others: tuple[Tensors, ...]
    experts: Experts = Experts(0, 0, 0, 0, 0)
    gated: bool = True
    head_bias: bool = False
    traits: Traits = PLAIN


def attention(
    sizes: Sizes, qkv_bias: bool = False, out_bias: bool = False, out: str = "o_proj"
) -> tuple[Linear, ...]:
    """Queries, keys, values and the output, each a matrix of its own."""
    hidden, layers = sizes.hidden, sizes.layers
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return (
        Linear("q_proj", hidden, queries, qkv_bias, layers),
        Linear("k_proj", hidden, keys, qkv_bias, layers),
        Linear("v_proj", hidden, keys, qkv_bias, layers),
        Linear(out, queries, hidden, out_bias, layers),
    )


def mlp(hidden: int, width: int, count: int, bias: bool = False) -> tuple[Linear, ...]:
    """Gate, up and down of `count` gated MLPs."""
    kinds = (
        Linear("gate_proj", hidden, width, bias, count),
        Linear("up_proj", hidden, width, bias, count),
        Linear("down_proj", width, hidden, bias, count),
    )
    return kinds if count else ()


def layer_norms(sizes: Sizes, per_layer: int) -> Tensors:
    """RMS norms, with the one before the head."""
    return Tensors(sizes.hidden, sizes.hidden * (per_layer * sizes.layers + 1))


def head_norms(sizes: Sizes) -> Tensors:
    """RMS norms of queries and of keys."""
    return Tensors(sizes.head_dim, sizes.head_dim * 2 * sizes.layers)
