"""From a config.json to a model's shape, by family (transformers' model_type)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plimsoll.errors import ConfigError
from plimsoll.shapes import decoders
from plimsoll.shapes.config_fields import (
    COUNT,
    LENGTH,
    WIDTH,
    Fields,
    longrope_positions,
)
from plimsoll.shapes.decoders import Decoder, Sizes
from plimsoll.shapes.shape import ModelShape

# Of so many layers, those that attend to a sliding window only. Each rule is asked only where
# config.json gives a window, and follows models/<family>/configuration_<family>.py of transformers.


def nowhere(fields: Fields, layers: int) -> int:
    """Attention is full, whatever the file says."""
    return 0


def everywhere(fields: Fields, layers: int) -> int:
    """In every layer."""
    return layers


def if_used(fields: Fields, layers: int) -> int:
    """In every layer, or none."""
    return layers if fields.flag("use_sliding_window") else 0


def on_top(fields: Fields, layers: int) -> int:
    """In the layers above the first max_window_layers."""
    if not fields.flag("use_sliding_window"):
        return 0
    full = fields.size("max_window_layers", COUNT, least=0)
    return _by_type(fields, max(0, layers - full))


def every_second_below(fields: Fields, layers: int) -> int:
    """In every second of the first max_window_layers."""
    if not fields.flag("use_sliding_window"):
        return 0
    below = min(layers, fields.size("max_window_layers", COUNT, least=0))
    return _by_type(fields, (below + 1) // 2)


def every_second(fields: Fields, layers: int) -> int:
    """In the first layer, the third, and so on."""
    return _by_type(fields, (layers + 1) // 2)


def but_every_nth(fields: Fields, layers: int) -> int:
    """In all but each layer that ends a pattern."""
    pattern = fields.size("sliding_window_pattern", COUNT)
    return _by_type(fields, layers - layers // pattern)


def _by_type(fields: Fields, otherwise: int) -> int:
    types = fields.list_or_none("layer_types")
    return otherwise if types is None else types.count("sliding_attention")


@dataclass(frozen=True)
class Family:
    """How to read the config.json of a model_type.

    defaults: what transformers takes for fields that the file leaves out.
    sliding: of so many layers, those that attend to a window only, where the file gives one.
    widths: how many widths of the MLP the file's intermediate_size counts.
    """

    decoder: Callable[[Fields, Sizes], Decoder]
    defaults: Mapping[str, object]
    sliding: Callable[[Fields, int], int] = nowhere
    widths: int = 1


_ANY = {"head_dim": None, "sliding_window": None, "tie_word_embeddings": False}
_HEADS = {"num_key_value_heads": None}
_WINDOW = {"sliding_window": 4096, "layer_types": None}
_QWEN = {"use_sliding_window": False, "max_window_layers": 28, **_WINDOW}
_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_GEMMA = {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {
    # The published files leave out what is as in transformers.
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window_pattern": 6,
}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
"""Fields that every family needs, from the file or from its defaults."""
_GLM4 = {"attention_bias": False, "use_qk_norm": False}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(decoders.llama, {**_HEADS, **_NO_BIAS}),
    "mistral": Family(decoders.mistral, {"sliding_window": 4096}, everywhere),
    "mixtral": Family(decoders.mixtral, {}, everywhere),
    "qwen": Family(decoders.qwen, {"no_bias": True}, widths=2),
    "qwen2": Family(decoders.qwen2, _QWEN, on_top),
    "qwen2_moe": Family(
        decoders.qwen2_moe, {"qkv_bias": True, **_MOE, **_QWEN}, every_second_below
    ),
    "qwen3": Family(decoders.qwen3, {**_NO_BIAS, **_QWEN, "head_dim": 128}, on_top),
    "qwen3_moe": Family(decoders.qwen3_moe, {**_NO_BIAS, **_MOE, **_QWEN}, if_used),
    "gemma": Family(decoders.gemma, _GEMMA),
    "gemma2": Family(decoders.gemma2, {**_GEMMA, **_WINDOW, **_GEMMA2}, every_second),
    "gemma3_text": Family(decoders.gemma3, {**_GEMMA, **_WINDOW, **_GEMMA3}, but_every_nth),
    "glm4_moe": Family(decoders.glm4_moe, _GLM4),
    "phi": Family(decoders.phi, {**_HEADS, "qk_layernorm": False}),
    "phi3": Family(decoders.phi3, _HEADS, everywhere),
}


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape that a config.json describes (its text_config, if it has one).

    name: of the model, in the shape and in messages. Raises ConfigError for a family that is not
    known, and for fields that are missing, of another type, out of bounds or at odds.
    """
    source, config = _text_part(config, f"config.json of {name!r}")
    family_name, family = _family(config, source)
    values = {**_ANY, **family.defaults, **config}
    _check_told(values, family_name, source)
    fields = Fields(source, values)
    sizes = _sizes(fields, family)
    decoder = family.decoder(fields, sizes)
    positions = fields.size("max_position_embeddings", LENGTH)
    window, sliding_layers = _window(fields, family, sizes.layers, positions)
    return ModelShape(
        name=name,
        family=family_name,
        **vars(sizes),
        vocabulary=fields.size("vocab_size", LENGTH),
        positions=longrope_positions(config) or positions,
        tied=fields.flag("tie_word_embeddings"),
        gated=decoder.gated,
        experts=decoder.experts.number,
        experts_per_token=decoder.experts.per_token,
        expert_intermediate=decoder.experts.width,
        shared_intermediate=decoder.experts.shared_width,
        sliding_window=window,
        sliding_layers=sliding_layers,
        linears=decoder.linears,
        other_tensors=decoder.others,
        softcapped=bool(fields.values.get("attn_logit_softcapping")),
        logits_softcapped=bool(fields.values.get("final_logit_softcapping")),
        head_bias=decoder.head_bias,
        traits=decoder.traits,
    )


def _text_part(config: Mapping[str, object], source: str) -> tuple[str, Mapping[str, object]]:
    """(what messages call it, the fields) of the text decoder."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return source, config
    return f"{source}, of the family {config.get('model_type')!r}, in its text_config", text


def _check_told(values: Mapping[str, object], family: str, source: str) -> None:
    """Families with more parts than a text decoder leave out of text_config what is as in
    transformers."""
    if missing := [name for name in _SIZES if name not in values]:
        raise ConfigError(
            f"{source}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Of a "
            f"{family!r} decoder Plimsoll knows no defaults for them: add those that transformers "
            f"takes, or download the model again."
        )


def _family(config: Mapping[str, object], source: str) -> tuple[str, Family]:
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name, FAMILIES[name]
    close = difflib.get_close_matches(str(name), FAMILIES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{source}: model_type is {name!r}, a family that Plimsoll does not know.{hint} "
        f"Known: {', '.join(FAMILIES)}."
    )


def _sizes(fields: Fields, family: Family) -> Sizes:
    hidden, heads = fields.size("hidden_size", WIDTH), fields.size("num_attention_heads", COUNT)
    head_dim = fields.size_or_none("head_dim", WIDTH)
    if head_dim is None:
        _check_divides(fields, "num_attention_heads", heads, "hidden_size")
    kv_heads = fields.size_or_none("num_key_value_heads", COUNT) or heads
    _check_divides(fields, "num_key_value_heads", kv_heads, "num_attention_heads")
    intermediate = fields.size("intermediate_size", WIDTH, least=family.widths)
    return Sizes(
        layers=fields.size("num_hidden_layers", COUNT),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate=intermediate // family.widths,
    )


def _check_divides(fields: Fields, name: str, value: int, whole: str) -> None:
    if fields.size(whole, WIDTH) % value:
        raise fields.error(name, f"does not divide {whole} {fields.values[whole]}")


def _window(fields: Fields, family: Family, layers: int, positions: int) -> tuple[int | None, int]:
    """The window and the layers that have it; a window of all positions is full attention."""
    if fields.values.get("use_sliding_window") is False:
        return None, 0  # whatever its size: transformers saves that as 0, or null
    window = fields.size_or_none("sliding_window", LENGTH)
    if window is None or window >= positions:
        return None, 0
    sliding = family.sliding(fields, layers)
    return (window, sliding) if sliding else (None, 0)
