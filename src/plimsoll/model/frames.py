"""What a model shows without weights: whether packs and the chunked head compute it rightly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from plimsoll.config.model import ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.model.checks import as_config_error

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_NOISE = re.compile(r"^(?!classifier|summary)\w*(dropout|pdrop|layerdrop|jitter_noise)\w*$")
_SAMPLING_ROUTERS = {"phimoe"}
"""Families that draw each token's experts at random while they train."""
_MASKING_LAYERS = {"doge"}
"""Families whose layers each compute a mask of their own from the values of all tokens."""


def check_frame(config: ModelConfig, hf_config: PreTrainedConfig, auto_class: Any) -> None:
    """Build the model without weights and refuse what packs or the head would compute wrongly."""
    saved_as = "".join(hf_config.architectures or [])
    if auto_class is AutoModelForCausalLM and saved_as.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"The model {config.path!r} is a reward model ({saved_as}): its head gives scores, "
            "and a language model is needed. Give the one that it was trained from, or another."
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
            "its layers compute masks of their own, in which sequences of a pack would mix, and "
            "packed attention takes none. Choose another model."
        )
    if any(name.endswith("sinks") for name, _ in frame.named_parameters()):
        yield "its attention has sinks, which packed attention does not compute."
    told = (settings, *map(vars, frame.modules()))
    if any(one.get("is_causal") is False for one in told):
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
    """Parameters that are neither the decoder's nor the head's."""
    known = {id(p) for part in (frame.get_decoder(), head) for p in part.parameters()}
    return [name for name, p in frame.named_parameters() if id(p) not in known]
