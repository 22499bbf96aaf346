"""Compute a model's shape from its config.json, by family (transformers' model_type).

families.json describes each family: the defaults of its config.json, the layers with a window, the
traits of its code (`Traits`), and its linears. A linear is a list of four: the last part of its
module's name, inputs, outputs, and whether it has a bias (true, false, or a field of config.json
that says so). The linears of a family follow its model in transformers
(models/<family>/modeling_<family>.py). transformers does not have `qwen`; its linears follow
modeling_qwen.py from the published model. An expert has the matrices of the published weights.
Routers are not linear layers in transformers, so adapters and quantisation do not apply to them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.shapes.shape import Latent, Linear, ModelShape, ParameterTensors, Traits

_COUNT = 4096
"""An upper bound for layers, heads and experts."""
_WIDTH = 2**20
"""An upper bound for the width of a layer."""
_LENGTH = 2**26
"""An upper bound for the vocabulary and the positions."""
_LONGROPE = ("longrope", "su")
"""Names of longrope in config.json; transformers uses the first."""

FAMILIES: Mapping[str, Mapping[str, Any]] = parse_json(
    files("plimsoll.shapes").joinpath("families.json").read_text("utf-8")
)
"""The families that the plan knows, as families.json describes them."""

ROUTED_FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""The mixtures of experts whose routers take a sampler's experts (model/routers.py)."""

_ANY = {"head_dim": None, "sliding_window": None, "tie_word_embeddings": False}
"""Defaults of every family."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
"""Fields that every family needs, from the file or from its defaults."""


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

    number: int = 0
    per_token: int = 0
    width: int = 0
    shared_width: int = 0
    layers: int = 0


# These functions return how many of `layers` layers attend to a sliding window only. They are used
# if config.json gives a window, and follow transformers' models/<family>/configuration_<family>.py.


def _every_layer(fields: Fields, layers: int) -> int:
    """Return the number of all layers."""
    return layers


def _upper_layers(fields: Fields, layers: int) -> int:
    """Return the number of layers above the first max_window_layers."""
    full = fields.size("max_window_layers", _COUNT, least=0)
    return _by_type(fields, max(0, layers - full))


def _every_second_lower_layer(fields: Fields, layers: int) -> int:
    """Return the number of every second layer among the first max_window_layers."""
    below = min(layers, fields.size("max_window_layers", _COUNT, least=0))
    return _by_type(fields, (below + 1) // 2)


def _every_second_layer(fields: Fields, layers: int) -> int:
    """Return the number of layers at odd places: the first, the third, and so on."""
    return _by_type(fields, (layers + 1) // 2)


def _all_but_nth(fields: Fields, layers: int) -> int:
    """Return the number of layers without the last layer of each pattern."""
    pattern = fields.size("sliding_window_pattern", _COUNT)
    return _by_type(fields, layers - layers // pattern)


def _by_type(fields: Fields, otherwise: int) -> int:
    types = fields.list_or_none("layer_types")
    return otherwise if types is None else types.count("sliding_attention")


_WINDOWS: Mapping[str, Callable[[Fields, int], int]] = {
    "every_layer": _every_layer,
    "upper_layers": _upper_layers,
    "every_second_lower_layer": _every_second_lower_layer,
    "every_second_layer": _every_second_layer,
    "all_but_nth": _all_but_nth,
}


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Return the shape that a config.json describes (its text_config, if it has one).

    Raises ConfigError if the family is unknown, or fields are missing, of another type, out of
    bounds or contradictory.
    """
    source, config = _text_part(config, f"config.json of {name!r}")
    family_name, family = _family(config, source)
    values = {**_ANY, **family["defaults"], **config}
    _check_complete(values, family_name, source)
    fields = Fields(source, values)
    latent = _latent(fields) if family.get("latent") else None
    sizes = _sizes(fields, family)
    experts = _experts(fields, family.get("experts"), sizes)
    traits = _traits(fields, family.get("traits", {}))
    positions = fields.size("max_position_embeddings", _LENGTH)
    window, sliding_layers = _window(fields, family, sizes.layers, positions)
    return ModelShape(
        name=name,
        family=family_name,
        **vars(sizes),
        vocabulary=fields.size("vocab_size", _LENGTH),
        positions=longrope_positions(config) or positions,
        tied=fields.flag("tie_word_embeddings"),
        gated=family.get("gated", True),
        experts=experts.number,
        experts_per_token=experts.per_token,
        expert_intermediate=experts.width,
        shared_intermediate=experts.shared_width,
        sliding_window=window,
        sliding_layers=sliding_layers,
        linears=tuple(_linears(fields, family["linears"], sizes, experts, latent)),
        other_tensors=tuple(_other_tensors(sizes, experts, traits, latent)),
        latent=latent,
        softcapped=bool(fields.values.get("attn_logit_softcapping")),
        logits_softcapped=bool(fields.values.get("final_logit_softcapping")),
        head_bias=family.get("head_bias", False),
        traits=traits,
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
    if missing := [name for name in SIZES if name not in values]:
        raise ConfigError(
            f"{source}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
            f"Plimsoll has no defaults for them in a {family!r} decoder. Add the values that "
            f"transformers takes, or download the model again."
        )


def _family(config: Mapping[str, object], source: str) -> tuple[str, Mapping[str, Any]]:
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name, FAMILIES[name]
    close = difflib.get_close_matches(str(name), FAMILIES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{source}: model_type is {name!r}, a family that Plimsoll does not know.{hint} "
        f"Known: {', '.join(FAMILIES)}."
    )


def _sizes(fields: Fields, family: Mapping[str, Any]) -> Sizes:
    hidden, heads = fields.size("hidden_size", _WIDTH), fields.size("num_attention_heads", _COUNT)
    if family.get("latent"):  # transformers writes the rotated dimensions as head_dim
        names = "qk_nope_head_dim", "qk_rope_head_dim"
        head_dim: int | None = sum(fields.size(name, _WIDTH) for name in names)
    else:
        head_dim = fields.size_or_none("head_dim", _WIDTH)
    if head_dim is None:
        _check_divides(fields, "num_attention_heads", heads, "hidden_size")
    kv_heads = fields.size_or_none("num_key_value_heads", _COUNT) or heads
    _check_divides(fields, "num_key_value_heads", kv_heads, "num_attention_heads")
    widths = family.get("widths", 1)  # Qwen 1 gives the width of gate and up together
    intermediate = fields.size("intermediate_size", _WIDTH, least=widths)
    return Sizes(
        layers=fields.size("num_hidden_layers", _COUNT),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate=intermediate // widths,
    )


def _latent(fields: Fields) -> Latent:
    """Return the widths of latent attention."""
    return Latent(
        width=fields.size("kv_lora_rank", _WIDTH),
        queries=fields.size_or_none("q_lora_rank", _WIDTH) or 0,
        rotary=fields.size("qk_rope_head_dim", _WIDTH),
        values=fields.size("v_head_dim", _WIDTH),
    )


def _experts(fields: Fields, described: Mapping[str, Any] | None, sizes: Sizes) -> Experts:
    """Return the experts of a mixture.

    `described` names the fields of config.json with their number (the first that is there; files
    saved by transformers 5 may name it otherwise), with their width, and with the width or number
    of shared experts. It is None for a dense model.
    """
    if described is None:
        return Experts()
    width = fields.size(described["width"], _WIDTH)
    shared = 0
    if "shared_width" in described:
        shared = fields.size(described["shared_width"], _WIDTH)
    elif "shared" in described:
        shared = width * fields.size(described["shared"], _COUNT)
    names = described["number"]
    number = fields.size(next((n for n in names if n in fields.values), names[-1]), _COUNT)
    per_token = fields.size("num_experts_per_tok", number)
    return Experts(number, per_token, width, shared, _sparse_layers(fields, sizes.layers))


def _sparse_layers(fields: Fields, layers: int) -> int:
    """Return the number of layers that have experts, by the fields that the family has for it."""
    if "first_k_dense_replace" in fields.values:
        return layers - fields.size("first_k_dense_replace", layers - 1, least=0)
    if "decoder_sparse_step" not in fields.values:
        return layers
    step = fields.size("decoder_sparse_step", layers)
    dense = fields.list_or_none("mlp_only_layers") or []
    sparse = sum(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if sparse == 0:
        raise fields.error("mlp_only_layers", "leaves no layer with experts")
    return sparse


def _traits(fields: Fields, described: Mapping[str, Any]) -> Traits:
    """Return a family's traits; a trait that is a text is the field of config.json that says it."""
    query_norms = described.get("query_norms", False)
    if isinstance(query_norms, str):
        query_norms = fields.flag(query_norms)
    return Traits(**{**described, "query_norms": query_norms})


def _linears(
    fields: Fields,
    described: Mapping[str, Any],
    sizes: Sizes,
    experts: Experts,
    latent: Latent | None,
) -> Iterator[Linear]:
    """Yield a family's linears.

    `described` has them by the layers or experts that each of them is in.
    """
    widths = {
        "hidden": sizes.hidden,
        "queries": sizes.heads * sizes.head_dim,
        "keys": sizes.kv_heads * sizes.head_dim,
        "mlp": sizes.intermediate,
        "expert": experts.width,
        "shared": experts.shared_width,
        "one": 1,
    }
    counts = {
        "layers": sizes.layers,
        "dense": sizes.layers - experts.layers,
        "experts": experts.layers * experts.number,
        "shared": experts.layers,
    }
    if latent is not None:
        widths |= {
            "latent": latent.width,
            "query_latent": latent.queries,
            "rotated": latent.rotary,
            "unrotated": sizes.heads * (sizes.head_dim - latent.rotary),
            "values": sizes.heads * latent.values,
        }
        counts["query_latent" if latent.queries else "no_query_latent"] = sizes.layers
    for part, linears in described.items():
        inputs = [linear[1] for linear in linears]
        for name, reads, gives, biased in linears if counts.get(part) else ():
            outputs = sum(widths[width] for width in gives.split("+"))
            # The experts of a layer are one tensor, and what reads the same input is one with it.
            stacked = experts.number * inputs.count(reads) if part == "experts" else 1
            bias = _has_bias(fields, biased)
            yield Linear(name, widths[reads], outputs, bias, counts[part], stacked)


def _has_bias(fields: Fields, biased: bool | str) -> bool:
    """Return whether a linear has a bias: a constant, a field, or `not` and a field."""
    if isinstance(biased, bool):
        return biased
    return fields.flag(biased.removeprefix("not ")) != biased.startswith("not ")


def _other_tensors(
    sizes: Sizes, experts: Experts, traits: Traits, latent: Latent | None
) -> Iterator[ParameterTensors]:
    """Yield the weights of norms (a layer norm has a bias, too), routers and attention sinks."""
    vectors = 2 if traits.norms == "layer" else 1
    per_layer = 4 if traits.post_norms else 1 if traits.parallel else 2
    norms = vectors * (per_layer * sizes.layers + 1)
    yield ParameterTensors(sizes.hidden, sizes.hidden * norms)
    if experts.number:
        router = experts.number * sizes.hidden
        yield ParameterTensors(router, router * experts.layers)
    if traits.clamped_experts:  # their router has a bias
        yield ParameterTensors(experts.number, experts.number * experts.layers)
    if traits.sinks:
        yield ParameterTensors(sizes.heads, sizes.heads * sizes.layers)
    for width in filter(None, (latent.width, latent.queries) if latent else ()):
        yield ParameterTensors(width, width * sizes.layers)
    if traits.query_norms:
        norms = vectors * 2 * sizes.layers
        yield ParameterTensors(sizes.head_dim, sizes.head_dim * norms)


def _check_divides(fields: Fields, name: str, value: int, whole: str) -> None:
    if fields.size(whole, _WIDTH) % value:
        raise fields.error(name, f"does not divide {whole} {fields.values[whole]}")


def _window(
    fields: Fields, family: Mapping[str, Any], layers: int, positions: int
) -> tuple[int | None, int]:
    """Return the window in tokens, and the number of layers with it; (None, 0) without a window.

    A window of at least all positions counts as none.
    """
    if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
        return None, 0  # whatever the size: transformers saves an unused window as 0, or null
    window = fields.size_or_none("sliding_window", _LENGTH)
    if window is None or window >= positions:
        return None, 0
    sliding = _WINDOWS[family["windows"]](fields, layers) if "windows" in family else 0
    return (window, sliding) if sliding else (None, 0)
