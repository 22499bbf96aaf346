"""What a model must be for packs and the chunked head to compute it rightly, and the refusals.

Everything here but `check_length` and `check_loaded` runs before a weight is read, and every
refusal is a ConfigError that says what to do instead. `frames.py` has what the model's classes
show; that a directory's files are there is seen before, where a run is checked
(spec/model_files.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig

from plimsoll.config.model import TOKENIZER_FILES
from plimsoll.errors import ConfigError

# Settings that change the logits, except the softcaps, which `logit_softcap` and attention read.
_CHANGES_LOGITS = re.compile(
    r"^(logit|logits|lm_head|output)_\w*(scal|mult|mup)\w*$|^dim_model_base$"
)
_MULTIPLIED = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "hyperclovax": "logits_scaling",
}
_DIVIDED = {"granite": "logits_scaling", "granitemoe": "logits_scaling"}


@contextmanager
def as_config_error(path: str, what: str) -> Iterator[None]:
    """Turn what a library says about unreadable files into one ConfigError with the path."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"Cannot read the {what} of the model {path!r}: {str(error).rstrip('.')}. {_mend(path)}"
        ) from error


def _mend(path: str) -> str:
    if Path(path).exists():
        return "Check that the files are complete and of a model that transformers knows."
    return (
        f"There is no directory {path} here, so it was taken for a name on the hub: give the path "
        "of a model directory, or check the name and the network."
    )


def read_model_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """config.json as transformers reads it. Raises ConfigError where none can be read, for encoders
    and for models of several parts."""
    with as_config_error(path, "config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"The model {path!r} is an encoder-decoder ({config.model_type}). "
            "Plimsoll trains decoders only; choose a causal language model."
        )
    if config.get_text_config() is not config:
        raise ConfigError(
            f"The model {path!r} ({config.model_type}) has parts beside its text decoder. "
            "Choose a text-only model, or save its text decoder alone and give that directory."
        )
    return config


def check_tokenizer_files(path: str) -> None:
    """A local directory, of a model or of an adapter, must hold a tokenizer, in JSON that can be
    read."""
    directory = Path(path)
    if not directory.is_dir():
        return
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"The model directory {path!r} has no tokenizer: none of "
            f"{', '.join(TOKENIZER_FILES)} is there. Copy the files of the tokenizer that the "
            "model was trained with into it."
        )
    for file in directory.glob("*token*.json"):
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(
                f"{file} is not valid JSON ({error}). Copy the tokenizer's file anew."
            ) from error


def has_generic_tokenizer(path: str) -> bool:
    """Whether a local directory's tokenizer is of no model family's own class."""
    settings, tokens = Path(path, "tokenizer_config.json"), Path(path, "tokenizer.json")
    if not settings.is_file() or not tokens.is_file():
        return False
    name = json.loads(settings.read_bytes()).get("tokenizer_class")
    return name in ("TokenizersBackend", "PreTrainedTokenizerFast")


def logit_scale(path: str, config: PreTrainedConfig) -> float:
    """The factor that the model's family multiplies its logits with; others are refused."""
    settings = config.to_dict()
    if config.model_type in _MULTIPLIED:
        return float(settings[_MULTIPLIED[config.model_type]])
    if config.model_type in _DIVIDED:
        return 1.0 / float(settings[_DIVIDED[config.model_type]])
    unknown = {k: v for k, v in settings.items() if _CHANGES_LOGITS.match(k) and v not in (None, 1)}
    if unknown:
        raise ConfigError(
            f"The model {path!r} ({config.model_type}) changes its logits by {unknown}, in a way "
            "that the chunked head does not know: its log-probabilities would be wrong. "
            f"Families with such a factor that are known: {', '.join(_MULTIPLIED | _DIVIDED)}."
        )
    return 1.0


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """cap * tanh(logits / cap), in families such as Gemma 2."""
    cap: float | None = config.to_dict().get("final_logit_softcapping")
    return cap


def check_length(config: PreTrainedConfig, longest: int) -> None:
    """Refuse sequences beyond which rotary angles follow the longest one: transformers takes the
    same for all that is in a forward, so a long sequence would change its neighbours in a pack."""
    rope = getattr(config, "rope_parameters", None) or {}
    match rope.get("rope_type"):
        case "longrope":  # Phi-3
            limit = rope["original_max_position_embeddings"]
        case "dynamic":
            limit = config.max_position_embeddings
        case _:
            return
    if longest > limit:
        raise ConfigError(
            f"A sequence is {longest:,} tokens long, and from {limit + 1:,} on the model's rope "
            f"({rope['rope_type']}) turns positions by other angles, those of shorter sequences in "
            "the same pack too. Make data.max_tokens (with rollout.sampling.max_new_tokens, where "
            f"responses are sampled) at most {limit:,}, or take a model with another rope_type."
        )


def check_loaded(path: str, report: Mapping[str, Any], may_be_new: set[str]) -> None:
    """Refuse a checkpoint that lacks tensors: they would silently be random."""
    absent = [f"{name} is missing" for name in sorted(set(report["missing_keys"]) - may_be_new)]
    reshaped = [
        f"{name} has the shape {list(found)} instead of {list(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    problems = absent + reshaped
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ConfigError(
            f"The weights of the model {path!r} do not fit: {'; '.join(problems[:5])}{more}. "
            "Copy the model again, correct its config.json, or choose another model."
        )
