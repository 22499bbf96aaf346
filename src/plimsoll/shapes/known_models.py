"""Look up models by path: a local config.json, shipped facts of well-known models, or the hub.

known_models.json has for each shape the fields of the published config.json that decide the shape,
and the names of the published models. These differ only in max_position_embeddings. other_parts
means that the published model has more parts than this text decoder.

The hub is asked whether it has a name before any library requests its files. Such libraries retry
for half a minute for each file if nothing answers. This check makes one request with a time limit
of seconds, and none for a name in the hub's cache. If a path has no model, the text says what to
write instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from plimsoll.config.engine import ADAPTER_FILE
from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.shapes.families import shape_from_config
from plimsoll.shapes.shape import ModelShape
from plimsoll.shapes.unknown import estimate_shape


def read_shape(path: str) -> ModelShape:
    """Return the shape of the model in a local directory, or of a well-known model.

    Raises ConfigError if its family is unknown, or as `read_fields`.
    """
    name, fields = read_fields(path)
    return shape_from_config(fields, name)


def find_shape(path: str) -> ModelShape:
    """Return the shape as `read_shape` does, but estimated if the family is unknown."""
    name, fields = read_fields(path)
    return estimate_shape(fields, name)


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
        counts: the numbers of query heads and of key heads.
    """

    keys: int | None
    values: int | None
    softcapped: bool
    counts: tuple[int, int] | None = None


def head_sizes(path: str) -> HeadSizes:
    """Return the sizes of a model's attention heads.

    Fields that config.json leaves out have the family's defaults. For an unknown family, the fields
    are read as transformers reads them.
    """
    with suppress(ConfigError, OSError):
        shape = read_shape(path)
        keys = None if shape.latent else shape.head_dim  # MLA: heads of several sizes
        counts = shape.heads, shape.kv_heads
        return HeadSizes(keys, shape.value_dim, shape.softcapped, counts)
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
    counts = None
    if isinstance(heads, int):
        counts = heads, fields.get("num_key_value_heads") or heads
    return HeadSizes(keys, values, bool(fields.get("attn_logit_softcapping")), counts)


RepositoryKind = Literal["model", "dataset"]
_PATIENCE = 3.0
"""Seconds; a name server that does not answer takes longer than any time limit of HTTP."""


def not_on_hub(name: str, kind: RepositoryKind) -> tuple[str, str] | None:
    """Return why a name cannot be read from the hub, and what to write instead; None if it can.

    The result is also None if the hub itself has an error: libraries then try again.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if _is_cached(name, kind):
        return None
    why = f"There is no such path here, nothing of it in {constants.HF_HUB_CACHE}, and"
    remedy = f"correct the path or name{_suggestion(name, kind)}"
    if constants.is_offline_mode():
        why += " HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids requests to the hub."
        return why, f"{remedy}; or unset the variable, to download it"
    if error := _connection_error():
        why += f" the hub ({constants.ENDPOINT}) does not answer: {error}."
        return why, f"{remedy}; or connect this machine, to download it"
    api = HfApi(endpoint=constants.ENDPOINT)
    failure = _failure(lambda: api.repo_info(name, repo_type=kind, timeout=_PATIENCE))
    if isinstance(failure, HFValidationError | RepositoryNotFoundError):
        why += f" the hub ({constants.ENDPOINT}) shows no {kind} of this name."
        return why, f"{remedy}; or, if it is not public, log in with `hf auth login`"
    return None


@cache
def _connection_error() -> str | None:
    """Return why the hub does not answer; None if it answers, even with an error."""
    from huggingface_hub import constants, get_session

    failure = _failure(lambda: get_session().head(constants.ENDPOINT, timeout=_PATIENCE))
    return None if failure is None else str(failure) or type(failure).__name__


def _failure(call: Callable[[], object]) -> Exception | None:
    """Return the exception of a call, or None; TimeoutError if the call takes too long."""
    raised: Future[Exception | None] = Future()

    def run() -> None:
        try:
            call()
            raised.set_result(None)
        except Exception as error:  # noqa: BLE001 - whatever the hub's HTTP library raises
            raised.set_result(error)

    Thread(target=run, daemon=True).start()
    try:
        return raised.result(timeout=_PATIENCE + 0.5)
    except TimeoutError:
        return TimeoutError(f"nothing came within {_PATIENCE:g} s")


def _is_cached(name: str, kind: RepositoryKind) -> bool:
    """Return whether the name, or a part of it, was read from the hub before."""
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"]
    if kind == "dataset":  # prepared by the library `datasets`
        prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
        folders.append(Path(prepared) / name.replace("/", "___"))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def _suggestion(name: str, kind: RepositoryKind) -> str:
    path = near_path(Path(name))
    candidates = [] if path is None else [str(path)]
    names = near_names(name) if kind == "model" else []
    candidates += [] if name in names else names
    return f" (did you mean {' or '.join(candidates)}?)" if candidates else ""


def missing_path(name: str, wanted: str) -> tuple[str, str] | None:
    """Return why nothing can be read at a path, and what to write instead; or None.

    None means that `name` may be a name on the hub. This holds for `organisation/name` if there is
    no local directory `organisation`, and for a single name if no local path is similar. `wanted`
    is the kind of path that is needed, such as `a model directory`.
    """
    path = Path(name)
    if path.exists():
        what = "It is a file." if path.is_file() else "It is neither a file nor a directory."
        return what, f"give the path of {wanted}"
    if path.is_symlink():
        return f"It is a link to {path.readlink()}, which is not there.", "mend the link"
    close = near_path(path)
    is_short = len(path.parts) <= 2 and path.parts[:1] not in ((".",), ("..",))
    is_name = is_short and not path.is_absolute() and not name.startswith((".", "~"))
    may_be_on_hub = is_name and (not close if len(path.parts) == 1 else not path.parent.is_dir())
    if may_be_on_hub and not path.suffix.startswith((".json", ".parquet", ".gz")):
        return None
    gone = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    why = f"There is no such file or directory: `{gone.name}` is not in {gone.parent.absolute()}."
    if close:
        return why, f"did you mean {close}?"
    return why, f"give the path of {wanted}, or a name on the hub"


def near_path(path: Path) -> Path | None:
    """Return the existing path that is most similar to `path`, folder by folder."""
    near = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (near / part).exists():
            siblings = sorted(sibling.name for sibling in near.iterdir()) if near.is_dir() else []
            close = difflib.get_close_matches(part, siblings, n=1)
            if not close:
                return None
            part = close[0]
        near /= part
    return near


def no_model(path: Path) -> tuple[str, str]:
    """Return why a directory without config.json is no model, and how to get a model from it.

    The second sentence begins in lower case and has no full stop.
    """
    if (path / ADAPTER_FILE).is_file():
        why = "It is an adapter alone, and a whole model is needed."
        return why, f"merge it first: plimsoll merge {path} --out DIRECTORY"
    for checkpoint in (path, path.parent):
        if (checkpoint / "state.json").is_file():
            why = f"{checkpoint} is a checkpoint, which holds no model in Hugging Face format."
            return why, f"write one: plimsoll export {checkpoint} --to DIRECTORY"
    why = "The directory has no config.json, so it is no model in Hugging Face format."
    inner = sorted(file.parent.name for file in path.glob("*/config.json"))
    if not inner and (path / "checkpoints").is_dir():
        return why, f"write the model of its run: plimsoll export {path} --to DIRECTORY"
    return why, f"did you mean {path / inner[-1]}?" if inner else "give a model directory"
