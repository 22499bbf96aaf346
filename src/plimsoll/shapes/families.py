"""Compute a model's shape from its config.json, by family (transformers' model_type)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plimsoll.errors import ConfigError
from plimsoll.shapes import decoders
from plimsoll.shapes.decoders import (
    COUNT,
    LENGTH,
    WIDTH,
    DecoderParts,
    Fields,
    Sizes,
    longrope_positions,
)
from plimsoll.shapes.shape import ModelShape

# These functions return how many of `layers` layers attend to a sliding window only. They are used
# if config.json gives a window, and follow transformers' models/<family>/configuration_<family>.py.


def no_layer(fields: Fields, layers: int) -> int:
    """Return 0: attention is always full."""
    return 0


def every_layer(fields: Fields, layers: int) -> int:
    """Return the number of all layers."""
    return layers


def upper_layers(fields: Fields, layers: int) -> int:
    """Return the number of layers above the first max_window_layers."""
    full = fields.size("max_window_layers", COUNT, least=0)
    return _by_type(fields, max(0, layers - full))


def every_second_lower_layer(fields: Fields, layers: int) -> int:
    """Return the number of every second layer among the first max_window_layers."""
    below = min(layers, fields.size("max_window_layers", COUNT, least=0))
    return _by_type(fields, (below + 1) // 2)


def every_second_layer(fields: Fields, layers: int) -> int:
    """Return the number of layers at odd places: the first, the third, and so on."""
    return _by_type(fields, (layers + 1) // 2)


def all_but_nth(fields: Fields, layers: int) -> int:
    """Return the number of layers without the last layer of each pattern."""
    pattern = fields.size("sliding_window_pattern", COUNT)
    return _by_type(fields, layers - layers // pattern)


def _by_type(fields: Fields, otherwise: int) -> int:
    types = fields.list_or_none("layer_types")
    return otherwise if types is None else types.count("sliding_attention")


@dataclass(frozen=True)
class FamilyReader:
    """The rules for reading the config.json of a model_type.

    Attributes:
        decoder: builds the parts from the fields and sizes.
        defaults: transformers' values for fields that the file leaves out.
        sliding: returns how many layers attend to a window only, if the file gives a window.
        widths: the number by which the file's intermediate_size is divided to get the MLP's width.
    """

    decoder: Callable[[Fields, Sizes], DecoderParts]
    defaults: Mapping[str, object]
    sliding: Callable[[Fields, int], int] = no_layer
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
    # The published files leave out transformers' defaults.
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

FAMILIES: Mapping[str, FamilyReader] = {
    "llama": FamilyReader(decoders.llama, {**_HEADS, **_NO_BIAS}),
    "mistral": FamilyReader(decoders.mistral, {"sliding_window": 4096}, every_layer),
    "mixtral": FamilyReader(decoders.mixtral, {}, every_layer),
    "qwen": FamilyReader(decoders.qwen, {"no_bias": True}, widths=2),
    "qwen2": FamilyReader(decoders.qwen2, _QWEN, upper_layers),
    "qwen2_moe": FamilyReader(
        decoders.qwen2_moe, {"qkv_bias": True, **_MOE, **_QWEN}, every_second_lower_layer
    ),
    "qwen3": FamilyReader(decoders.qwen3, {**_NO_BIAS, **_QWEN, "head_dim": 128}, upper_layers),
    "qwen3_moe": FamilyReader(decoders.qwen3_moe, {**_NO_BIAS, **_MOE, **_QWEN}, every_layer),
    "gemma": FamilyReader(decoders.gemma, _GEMMA),
    "gemma2": FamilyReader(decoders.gemma2, {**_GEMMA, **_WINDOW, **_GEMMA2}, every_second_layer),
    "gemma3_text": FamilyReader(decoders.gemma3, {**_GEMMA, **_WINDOW, **_GEMMA3}, all_but_nth),
    "glm4_moe": FamilyReader(decoders.glm4_moe, _GLM4),
    "phi": FamilyReader(decoders.phi, {**_HEADS, "qk_layernorm": False}),
    "phi3": FamilyReader(decoders.phi3, _HEADS, every_layer),
}


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Return the shape that a config.json describes (its text_config, if it has one).

    Raises ConfigError if the family is unknown, or fields are missing, of another type, out of
    bounds or contradictory.
    """
    source, config = _text_part(config, f"config.json of {name!r}")
    family_name, family = _family(config, source)
    values = {**_ANY, **family.defaults, **config}
    _check_complete(values, family_name, source)
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
    """Return the text decoder's description for messages, and its fields."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return source, config
    return f"{source}, of the family {config.get('model_type')!r}, in its text_config", text


def _check_complete(values: Mapping[str, object], family: str, source: str) -> None:
    """Raise ConfigError if a size that every family needs is missing.

    The text_config of models with more parts may leave out sizes that equal transformers' defaults.
    """
    if missing := [name for name in _SIZES if name not in values]:
        raise ConfigError(
            f"{source}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
            f"Plimsoll has no defaults for them in a {family!r} decoder. Add the values that "
            f"transformers takes, or download the model again."
        )


def _family(config: Mapping[str, object], source: str) -> tuple[str, FamilyReader]:
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name, FAMILIES[name]
    close = difflib.get_close_matches(str(name), FAMILIES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{source}: model_type is {name!r}, a family that Plimsoll does not know.{hint} "
        f"Known: {', '.join(FAMILIES)}."
    )


def _sizes(fields: Fields, family: FamilyReader) -> Sizes:
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


def _window(
    fields: Fields, family: FamilyReader, layers: int, positions: int
) -> tuple[int | None, int]:
    """Return the window in tokens, and the number of layers with it; (None, 0) without a window.

    A window of at least all positions counts as none.
    """
    if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
        return None, 0  # whatever the size: transformers saves an unused window as 0, or null
    window = fields.size_or_none("sliding_window", LENGTH)
    if window is None or window >= positions:
        return None, 0
    sliding = family.sliding(fields, layers)
    return (window, sliding) if sliding else (None, 0)
