"""Look up shapes of models by path: a local config.json, or shipped facts of well-known models.

known_models.json has for each shape the fields of the published config.json that decide the shape,
and the names of the published models. These differ only in max_position_embeddings. other_parts
means that the published model has more parts than this text decoder.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.shapes.families import shape_from_config
from plimsoll.shapes.missing_path import missing_path, near_path, no_model
from plimsoll.shapes.shape import ModelShape


def read_shape(path: str) -> ModelShape:
    """Return the shape of the model in a local directory, or of a well-known model."""
    name, fields = read_fields(path)
    return shape_from_config(fields, name)


def read_fields(path: str) -> tuple[str, Mapping[str, object]]:
    """Return a model's name and the fields of its config.json that decide its shape.

    `path` is a local directory, or the name of a well-known model on the hub. The name may leave
    out the organisation, and case does not matter. Raises ConfigError if neither is there, or the
    file is unusable.
    """
    directory = Path(path)
    if directory.is_dir():
        return path, _read_config(directory / "config.json")
    if known := _by_key().get(_key(path)):
        return known
    if missing := missing_path(path, "a model directory"):
        what, instead = missing
        raise ConfigError(f"{path}: {what} -> {instead}")
    raise ConfigError(_unknown(path))


def has_other_parts(path: str) -> bool:
    """Return whether the model has more than the text decoder of its shape, such as vision."""
    name, fields = read_fields(path)
    shipped = (shape["positions"] for shape in _shapes() if shape.get("other_parts"))
    return "text_config" in fields or any(name in names for names in shipped)


@cache
def known_models() -> Mapping[str, Mapping[str, object]]:
    """Return the essential config.json of each well-known model, by its name on the hub."""
    return {
        name: {**shape["config"], "max_position_embeddings": positions}
        for shape in _shapes()
        for name, positions in shape["positions"].items()
    }


@cache
def _shapes() -> Sequence[Mapping[str, Any]]:
    text = files("plimsoll.shapes").joinpath("known_models.json").read_text("utf-8")
    shapes: list[Mapping[str, Any]] = parse_json(text)
    return shapes


def _read_config(file: Path) -> Mapping[str, object]:
    try:
        config = parse_json(file.read_bytes())
    except FileNotFoundError as error:
        what, instead = no_model(file.parent)
        raise ConfigError(f"{file.parent}: {what} -> {instead}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}. Download the model again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is a {type(config).__name__}, not an object of fields.")
    return config


@cache
def _by_key() -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """Return (name, config) of each model, by the key of its full name and of its short name."""
    keys = {_key(name): (name, config) for name, config in known_models().items()}
    return keys | {key.rpartition("/")[2]: known for key, known in keys.items()}


def _key(name: str) -> str:
    """Return a normalised name, equal for all spellings of the same model's name."""
    organisation, slash, model = name.lower().replace("_", ".").rpartition("/")
    return organisation + slash + model.removeprefix("meta-").removesuffix("-hf")


def near_names(path: str) -> list[str]:
    """Return up to three well-known models with the most similar names."""
    keys = _by_key()
    close = difflib.get_close_matches(_key(path).rpartition("/")[2], keys, n=3)
    return list(dict.fromkeys(keys[key][0] for key in close))


def _unknown(path: str) -> str:
    local = near_path(Path(path))
    nearest = ", ".join([*([] if local is None else [str(local)]), *near_names(path)])
    known = ", ".join(next(iter(shape["positions"])) for shape in _shapes())
    return (
        f"{path!r} is neither a directory here nor the name of a model whose shape Plimsoll knows."
        + (f" Nearest: {nearest}." if nearest else "")
        + " Give a directory that holds the model's config.json, or a name that `plimsoll plan` "
        + f"knows.\nKnown, with their published variants: {known}."
    )


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of a model's attention heads; None if config.json does not give the size.

    Attributes:
        keys: dimensions of a query or key.
        values: dimensions of a value.
        softcapped: whether the model bounds its attention scores.
    """

    keys: int | None
    values: int | None
    softcapped: bool


def head_sizes(path: str) -> HeadSizes:
    """Return the sizes of a model's attention heads.

    Fields that config.json leaves out have the family's defaults. For an unknown family, the fields
    are read as transformers reads them.
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
    """Return the sizes of the attention heads in the fields of a decoder's config."""
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    share = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    keys = fields.get("qk_head_dim") or fields.get("head_dim") or share
    values = fields.get("v_head_dim") or keys
    return HeadSizes(keys, values, bool(fields.get("attn_logit_softcapping")))
