"""The attention heads of a model that is named by its path."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.errors import ConfigError
from plimsoll.shapes.known_models import read_fields, read_shape


@dataclass(frozen=True)
class HeadSizes:
    """The attention heads of a model, as its config.json has them; None where it does not say.

    Attributes:
        keys: dimensions of a query or key.
        values: dimensions of a value.
        softcapped: whether the model bounds its attention scores.
    """

    keys: int | None
    values: int | None
    softcapped: bool


def head_sizes(path: str) -> HeadSizes:
    """Return the attention heads of a model.

    Fields that config.json leaves out have the family's defaults. An unknown family is read as
    transformers reads it.
    """
    with suppress(ConfigError, OSError):
        shape = read_shape(path)
        return HeadSizes(shape.head_dim, shape.head_dim, shape.softcapped)
    try:
        fields = read_fields(path)[1]
    except (ConfigError, OSError):  # loading says why
        return HeadSizes(None, None, softcapped=False)
    text = fields.get("text_config")
    model: Mapping[str, Any] = text if isinstance(text, dict) else fields
    heads = heads_of(model)
    if "kv_lora_rank" in model:  # MLA: heads of several sizes
        return replace(heads, keys=None, values=model.get("v_head_dim"))
    return heads


def heads_of(fields: Mapping[str, Any]) -> HeadSizes:
    """Return the attention heads that the fields of a decoder's config have."""
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    share = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    keys = fields.get("qk_head_dim") or fields.get("head_dim") or share
    values = fields.get("v_head_dim") or keys
    return HeadSizes(keys, values, bool(fields.get("attn_logit_softcapping")))
