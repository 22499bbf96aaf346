"""Check a model directory by its files alone: no torch, no weights in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plimsoll.config.data import template_file
from plimsoll.config.engine import TOKENIZER_FILES, ModelConfig
from plimsoll.config.json_text import parse_json
from plimsoll.config.problems import Problem, invalid, show
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.shapes.known_models import RepositoryKind, missing_path, no_model, not_on_hub

_INDEX = "model.safetensors.index.json"
_NO_TOKENIZER = (
    f"The directory has no tokenizer: none of {', '.join(TOKENIZER_FILES)}.",
    "copy the tokenizer's files of the model that it was made from into it",
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def models_by_key(spec: RunSpec[Any]) -> dict[str, ModelConfig]:
    """Return the models that the config names, by their dotted keys.

    The actor's model is included even if no role trains it and only engines load it.
    """
    roles = (role for role in spec.roles.values() if role.given)
    return {"actor.model": spec.actor.model} | {f"{role.key}.model": role.model for role in roles}


def check_model(key: str, given: str, *, tokenizer: bool) -> Iterator[Problem]:
    """Yield problems of the model at `key`: a missing path, config, weights or tokenizer.

    For a name on the hub only its existence is checked. `tokenizer` says whether the run reads this
    model's tokenizer.
    """
    path = Path(given)
    if not path.is_dir():
        if problem := check_missing(key, given, "model"):
            yield problem
        return
    alone = _no_config(path)  # without a config, the other files are missing too
    rest = [_no_weights(path), _NO_TOKENIZER if tokenizer and not has_tokenizer(given) else None]
    for why, instead in filter(None, [alone] if alone else rest):
        yield invalid(key, show(given), why, instead)


def check_head(key: str, path: str, *, scores: bool) -> Iterator[Problem]:
    """Yield a problem if a reward model stands where a language model is needed, or the reverse.

    A name on the hub is not checked. `key` is the key of the path; `scores` says whether a reward
    model is needed.
    """
    saved_as = str(_read_object(Path(path, "config.json")).get("architectures")).strip("[']")
    if scores and saved_as.endswith("ForCausalLM"):
        why = f"It is a language model ({saved_as}), which has no head that gives scores."
        yield invalid(key, show(path), why, "a reward model, such as `plimsoll rm` makes")
    elif not scores and saved_as.endswith("ForSequenceClassification"):
        why = f"It is a reward model ({saved_as}): its head gives scores."
        yield invalid(key, show(path), why, "a language model, such as the one that it began as")


MXFP4 = (
    "Its experts are in MXFP4, codes of 4 bits that no gradient can change.",
    "a copy in bfloat16: load it in transformers with `quantization_config="
    "Mxfp4Config(dequantize=True)`, and save it with `save_original_format=False`",
)
"""Why a checkpoint of gpt-oss as it is published cannot be trained, and what to give instead."""


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes weights in MXFP4."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def check_codes(key: str, path: str) -> Iterator[Problem]:
    """Yield a problem if a local model's weights are in MXFP4; `key` is the key of the path."""
    if is_mxfp4(_read_object(Path(path, "config.json"))):
        yield invalid(key, show(path), *MXFP4)


def check_template(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems if a chat template is missing, or a template's file does not exist."""
    data, model = spec.data, spec.actor.model
    yield from _template_file("data.chat_template", data.chat_template)
    for key, source in data.sources().items():
        yield from _template_file(f"{key}.chat_template", source.chat_template)
    takes_its_own = any(data.template_of(source) is None for source in data.sources().values())
    if takes_its_own and lacks_template(model.path):
        why = f"The tokenizer of {model.path} brings no chat template."
        instead = "a Jinja template, the path of one, or `none` to join prompt and response"
        yield invalid("data.chat_template", None, why, f"{instead} as plain text")


def _template_file(key: str, given: str | None) -> Iterator[Problem]:
    if given is None or given == "none":
        return
    if (file := template_file(given)) and not file.is_file():
        why = "It is neither a Jinja template nor `none`, and there is no such file."
        yield invalid(key, show(given), why, "correct the path")


def lacks_template(path: str) -> bool:
    """Return whether a local directory holds a tokenizer without a chat template.

    The places are those where transformers looks. False for a name on the hub.
    """
    model = Path(path)
    if not (model.is_dir() and has_tokenizer(path)):
        return False
    settings = _read_object(model / "tokenizer_config.json")
    return not (
        settings.get("chat_template") or any((model / name).exists() for name in _TEMPLATES)
    )


def read_model_json(path: str) -> dict[str, Any]:
    """Return a local model's config.json (its text part, if it has several); {} if unreadable."""
    config = _read_object(Path(path, "config.json"))
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # `check_model` says why
    return value if isinstance(value, dict) else {}


def has_tokenizer(path: str) -> bool:
    """Return whether a local directory holds a tokenizer."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def check_missing(key: str, name: str, kind: RepositoryKind) -> Problem | None:
    """Return a problem if `name` is neither a local path nor a name on the hub; else None."""
    expected = "a model directory" if kind == "model" else "a data file or directory"
    reasons = missing_path(name, expected) or not_on_hub(name, kind)
    return None if reasons is None else invalid(key, show(name), *reasons)


def _no_config(path: Path) -> tuple[str, str] | None:
    file = path / "config.json"
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return no_model(path)
    except (OSError, ValueError) as error:
        return f"Its config.json cannot be read: {error}.", "copy the model again"
    if not isinstance(config, dict) or "model_type" not in config:
        return "Its config.json names no model_type.", "copy the model again"
    return None


def _no_weights(path: Path) -> tuple[str, str] | None:
    try:
        files = _weight_files(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Its {_INDEX} cannot be read: {error!r}.", "copy the model again"
    if not files:
        pickled = any(path.glob("*.bin"))
        return (
            "The directory has no *.safetensors weights"
            + ("; *.bin files are pickles, which can run code when read." if pickled else "."),
            "save the model with `save_pretrained` of transformers"
            if pickled
            else "give a directory that has weights",
        )
    broken = [file.name for file in files if not _whole(file)]
    if broken:
        return f"Missing or cut short: {', '.join(broken)}.", "download or copy the model again"
    return None


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        shards = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [path / shard for shard in sorted(set(shards))]
    return sorted(path.glob("*.safetensors"))


def _whole(file: Path) -> bool:
    """Return whether the file is as long as its safetensors header says.

    A half-finished download and a Git LFS pointer are not.
    Format: https://huggingface.co/docs/safetensors, "Format".
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length + 8 > size:
                return False
            header = parse_json(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(size == 8 + length + max(ends, default=0))
