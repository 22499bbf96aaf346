"""Shapes of models by path: from a local config.json, or from shipped facts of well-known models.

known_models.json has, for each shape, the fields of the published config.json that decide it, and
the published names with their max_position_embeddings, in which alone they differ. other_parts:
what is published has more than this text decoder.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plimsoll.errors import ConfigError
from plimsoll.shapes.families import shape_from_config
from plimsoll.shapes.missing_path import missing_path, near_path, no_model
from plimsoll.shapes.shape import ModelShape


def read_shape(path: str) -> ModelShape:
    """The shape of the model in a local directory, or of a well-known one by its name on the hub.

    Raises ConfigError as `read_fields`, and for fields of which no shape can be made.
    """
    name, fields = read_fields(path)
    shipped = fields is known_models().get(name)
    return _known_shape(name) if shipped else shape_from_config(fields, name)


@cache
def _known_shape(name: str) -> ModelShape:
    return shape_from_config(known_models()[name], name)


def read_fields(path: str) -> tuple[str, Mapping[str, object]]:
    """A model's name and its config.json: of a local directory, or what decides the shape of a
    well-known model by its name on the hub.

    Names may leave out the organisation; their case does not matter. Raises ConfigError for a
    directory without a config.json that can be used, a path that is not there, and a name that is
    not known: those that are, are on a second line.
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
    """Whether the shape is only the text decoder of what is there, as of a model that sees.

    Raises ConfigError as `read_fields`.
    """
    name, fields = read_fields(path)
    return "text_config" in fields or name in _with_other_parts()


@cache
def _with_other_parts() -> frozenset[str]:
    found = [shape["positions"] for shape in _shapes() if shape.get("other_parts")]
    return frozenset(name for positions in found for name in positions)


@cache
def known_models() -> Mapping[str, Mapping[str, object]]:
    """The essential config.json of each well-known model, by its name on the hub."""
    return {
        name: {**shape["config"], "max_position_embeddings": positions}
        for shape in _shapes()
        for name, positions in shape["positions"].items()
    }


@cache
def _shapes() -> Sequence[Mapping[str, Any]]:
    text = files("plimsoll.shapes").joinpath("known_models.json").read_text("utf-8")
    shapes: list[Mapping[str, Any]] = json.loads(text)
    return shapes


def _read_config(file: Path) -> Mapping[str, object]:
    try:
        config = json.loads(file.read_bytes())
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
    """By organisation and name, and by the name alone."""
    keys = {_key(name): (name, config) for name, config in known_models().items()}
    return keys | {key.rpartition("/")[2]: known for key, known in keys.items()}


def _key(name: str) -> str:
    """Without what the published names of one model differ in."""
    organisation, slash, model = name.lower().replace("_", ".").rpartition("/")
    return organisation + slash + model.removeprefix("meta-").removesuffix("-hf")


def near_names(path: str) -> list[str]:
    """The well-known models that are called most like it."""
    keys = _by_key()
    close = difflib.get_close_matches(_key(path).rpartition("/")[2], keys, n=3)
    return list(dict.fromkeys(keys[key][0] for key in close))


def _unknown(path: str) -> str:
    here = near_path(Path(path))
    nearest = ", ".join([*([] if here is None else [str(here)]), *near_names(path)])
    known = ", ".join(next(iter(shape["positions"])) for shape in _shapes())
    return (
        f"{path!r} is neither a directory here nor the name of a model whose shape Plimsoll knows."
        + (f" Nearest: {nearest}." if nearest else "")
        + " Give a directory that holds the model's config.json, or a name that `plimsoll plan` "
        + f"knows.\nThose, and published variants of them: {known}."
    )
