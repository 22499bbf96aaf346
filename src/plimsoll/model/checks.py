"""Refuse models that packs and the chunked head would compute wrongly.

Everything here but `check_length` and `check_loaded` runs before a weight is read, and every
refusal is a ConfigError that says what to do instead. That a directory's files exist is checked
earlier, with the run (resolve/model_files.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from plimsoll.config.engine import TOKENIZER_FILES, ModelConfig
from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.resolve.model_files import MXFP4, is_mxfp4

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
    """Turn a library's errors about unreadable files into one ConfigError with the path."""
    try:
        yield
    except (PlimsollError, MemoryError):
        raise
    except Exception as error:  # libraries check little of a file, and raise what comes of it
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
    """Return a model's config.json.

    Raises ConfigError if it is unreadable, or if the model is not a text decoder alone.
    """
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
    """Raise ConfigError if a local directory has no tokenizer, or one with unreadable JSON."""
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
            content = parse_json(file.read_bytes())
        except ValueError as error:
            raise ConfigError(
                f"{file} is not valid JSON ({error}). Copy the tokenizer's file anew."
            ) from error
        if not isinstance(content, dict):
            raise ConfigError(
                f"{file} holds a JSON {type(content).__name__}, and an object is needed. Copy the "
                f"tokenizer's file anew."
            )


def has_generic_tokenizer(path: str) -> bool:
    """Return whether a local directory's tokenizer has a generic class, of no model family."""
    settings, tokens = Path(path, "tokenizer_config.json"), Path(path, "tokenizer.json")
    if not settings.is_file() or not tokens.is_file():
        return False
    name = parse_json(settings.read_bytes()).get("tokenizer_class")
    return name in ("TokenizersBackend", "PreTrainedTokenizerFast")


def logit_scale(path: str, config: PreTrainedConfig) -> float:
    """Return the factor by which a model multiplies its logits; ConfigError if it is unknown."""
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
    """Return the cap in cap * tanh(logits / cap), as Gemma 2 has it; None without a cap."""
    cap: float | None = config.to_dict().get("final_logit_softcapping")
    return cap


def check_length(config: PreTrainedConfig, longest: int) -> None:
    """Raise ConfigError for sequences so long that the rotary angles of all positions change.

    transformers computes the angles for all tokens of a forward pass together. So a long sequence
    would change the angles of its neighbours in a pack.
    """
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
    """Raise ConfigError if a checkpoint lacks tensors, which would silently get random values.

    Only the tensors named in `may_be_new` may be missing.
    """
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


_LEAST_BYTES = 0.25
"""Bytes of a parameter in the files, at least: 4-bit codes take 0.5."""


def _check_files_are_large_enough(path: str, frame: PreTrainedModel) -> None:
    """Raise ConfigError if a directory's files are far too small for the model of its config.json.

    transformers would give all missing weights memory and random values before they are reported.
    """
    parameters = sum(parameter.numel() for parameter in frame.parameters())
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if 0 < stored < parameters * _LEAST_BYTES:
        raise ConfigError(
            f"The model {path!r} has {stored:,} bytes of weights, and its config.json describes "
            f"{parameters:,} parameters. Copy the model again, or correct its config.json."
        )


_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_NOISE = re.compile(r"^(?!classifier|summary)\w*(dropout|pdrop|layerdrop|jitter_noise)\w*$")
_SAMPLING_ROUTERS = {"phimoe"}
"""Families that draw each token's experts at random while they train."""
_MASKING_LAYERS = {"doge"}
"""Families whose layers each compute a mask of their own from the values of all tokens."""


def check_frame(config: ModelConfig, hf_config: PreTrainedConfig, auto_class: Any) -> None:
    """Raise ConfigError if packs or the head would compute this model wrongly.

    The model is built without weights for this check.
    """
    saved_as = str(hf_config.architectures).strip("[']")
    if auto_class is AutoModelForCausalLM and saved_as.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"The model {config.path!r} is a reward model ({saved_as}): its head gives scores. A "
            "language model is needed. Give the model that it was trained from, or another."
        )
    with as_config_error(config.path, "architecture"), torch.device("meta"):
        frame: PreTrainedModel = auto_class.from_config(
            deepcopy(hf_config),
            attn_implementation="eager",  # every model has it, so the refusals below are ours
            trust_remote_code=config.trust_remote_code,
        )
    for reason in _reasons_against(frame, hf_config.to_dict()):
        raise ConfigError(
            f"The model {config.path!r} ({type(frame).__name__}) cannot be trained: {reason}"
        )
    _check_files_are_large_enough(config.path, frame)


def _reasons_against(frame: PreTrainedModel, settings: Mapping[str, Any]) -> Iterator[str]:
    other_layers = set(settings.get("layer_types") or ()) - _PLAIN_LAYERS
    if other_layers or frame._is_stateful:
        kinds = ", ".join(sorted(other_layers)) or "recurrence"
        yield (
            f"it has layers of {kinds}, in which sequences of a pack would mix. Choose a model "
            "whose layers are all of full or sliding attention."
        )
    if not frame.is_backend_compatible():
        yield (
            "its attention does not go through transformers' attention interface, so sequences of "
            "a pack would see one another. Choose a model that supports it (most since 2023 do)."
        )
    if settings.get("model_type") in _MASKING_LAYERS:
        yield (
            "its layers compute masks of their own, which packed attention does not take: "
            "sequences of a pack would mix. Choose another model."
        )
    if is_mxfp4(settings):
        yield "{} Give {}.".format(*MXFP4)
    if any(values.get("is_causal") is False for values in (settings, *map(vars, frame.modules()))):
        yield "its attention is not causal: it is an encoder. Choose a causal language model."
    noise = {k: v for k, v in settings.items() if _NOISE.match(k) and v}
    if noise:
        yield (
            f"it has {noise}, which would make the ratio of two forward passes noise. "
            "Set every one of them in its config.json to 0."
        )
    if settings.get("model_type") in _SAMPLING_ROUTERS:
        yield "it draws the experts of each token at random while it trains. Choose another model."
    if settings.get("output_router_logits"):
        yield (
            "it asks for the router's auxiliary loss (output_router_logits), which Plimsoll does "
            "not add: routers learn from the job's loss alone. Write false in its config.json."
        )
    is_value = "score" in dict(frame.named_children())
    head = frame.get_submodule("score") if is_value else frame.get_output_embeddings()
    if type(head) is not nn.Linear:
        yield f"its head is a {type(head).__name__}, and only a Linear is known."
    elif between := _outside(frame, head):
        yield (
            f"it has layers between its decoder and its head ({', '.join(between)}), which the "
            "chunked head does not compute. Choose another model."
        )


def _outside(frame: PreTrainedModel, head: nn.Module) -> list[str]:
    """Return the parameters that are neither the decoder's nor the head's."""
    known = {id(p) for part in (frame.get_decoder(), head) for p in part.parameters()}
    return [name for name, p in frame.named_parameters() if id(p) not in known]
