"""Write model directories that transformers and vLLM load, and translate the names of weights.

A directory has the weights, the tokenizer, its chat template and the generation config. In memory
transformers keeps the experts of a mixture stacked, under other names than in files.

transformers 5 writes some settings of models and tokenizers under new names alone. Version 4 does
not find them, and takes its defaults silently: a model with `rope_theta` 1,000,000 is
computed with 10,000. So they are written in the older form, too. Version 5 reads both forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from plimsoll.data.template import make_template
from plimsoll.run.files import whole_directory, write_whole


@dataclass(frozen=True, eq=False)
class Companions:
    """Files that are saved beside a model's weights.

    Attributes:
        tokenizer: the tokenizer, with the chat template that the model was trained with.
        generation: the generation config; None for a model that scores.
        added_end: the end of the template's turns, if the model's own files do not name it as an
            end of responses.
    """

    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None
    added_end: str | None = None


def companions(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Companions:
    """Return the companions of a trained model.

    Args:
        lm: the trained model.
        tokenizer: the tokenizer of the model that training began with, newly read.
        template: the Jinja template of training, which becomes the tokenizer's. None: training
            used the tokenizer's own. The end of its turns becomes an end token of generation.
            `none`: training used no template.
    """
    generation = deepcopy(lm.generation_config) if lm.can_generate() else None
    if template == "none":
        return Companions(tokenizer, generation)
    if template is not None:
        tokenizer.chat_template = template
    end = None if generation is None else make_template(tokenizer, template, None).turn_end()
    if generation is None or end is None:
        return Companions(tokenizer, generation)
    ends, token = generation.eos_token_id, int(tokenizer.convert_tokens_to_ids(end))
    generation.eos_token_id = _with_end(ends, token)
    known = generation.eos_token_id == ends or token == tokenizer.eos_token_id
    return Companions(tokenizer, generation, None if known else end)


def _with_end(ends: int | list[int] | None, token: int) -> int | list[int]:
    """Return the ends with a further token; a single end stays a number, as in most files."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in known:
        return token if ends == token else known
    return [*known, token] if known else token


def write_generation(generation: GenerationConfig, directory: Path) -> None:
    """Write generation_config.json unchanged.

    `save_pretrained` would refuse settings of which transformers only warns when it reads them.
    Llama 2 was published with such settings.
    """
    generation.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


WRAPPER = "lm."
"""The prefix of the parameter names of a PolicyModel or ValueModel."""


def hf_state_names(model: nn.Module) -> dict[str, str]:
    """Return {name in the module: Hugging Face name} of a model's parameters.

    Tied parameters occur once. The parameters of adapters are left out; a layer that an adapter
    wraps has the name that it has without the adapter.
    """
    names = (name for name, _ in model.named_parameters())
    return {name: plain_name(name) for name in names if not is_of_adapter(name)}


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter; see `adapters.py`."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """Return the Hugging Face name of a parameter or buffer of a PolicyModel or ValueModel."""
    return name.removeprefix(WRAPPER).replace(".base_layer.", ".")


def save_hf(
    config: PreTrainedConfig,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Write a Hugging Face directory, whole or not at all, in place of an existing one.

    `config` is `model.lm.config`; its entry `architectures` names the class of the weights. `state`
    has the full tensors by Hugging Face name, on any device. Of tied tensors (the same storage
    under several names) only the first is written; transformers ties them again as it loads. Raises
    PlimsollError with the path if the disk is full or not writable.
    """
    assert all(t.numel() > 0 for t in state.values()), "a sharded tensor was not gathered"
    tensors = _without_ties(state)
    saved_config = deepcopy(config)
    saved_config.dtype = next(iter(tensors.values())).dtype
    with whole_directory(Path(directory)) as partial:
        saved_config.save_pretrained(partial)
        save_torch_state_dict(tensors, partial, max_shard_size="5GB", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        add_older_settings(partial)
        if generation_config is not None:
            write_generation(generation_config, partial)


def _without_ties(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.device, tensor.data_ptr()), name)
    return {name: state[name] for name in first.values()}


_LAYER = re.compile(r".*?\.layers\.\d+\.")


def published_weights(
    lm: PreTrainedModel, weights: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all weights, named and split up as in the model's files.

    `weights` has the full tensors as the model in memory has them, by Hugging Face name. It is
    emptied layer by layer, because some yielded tensors are copies. Others share memory.
    """
    for names in _by_layer(weights):
        layer = {name: weights.pop(name) for name in names}
        yield from revert_weight_conversion(lm, layer).items()


def weights_for_files(lm: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `published_weights` as a dict; no two tensors share memory, as files require."""
    whole = set(weights)
    return {n: t if n in whole else t.clone() for n, t in published_weights(lm, weights)}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the files of a PolicyModel or ValueModel hold, by Hugging Face name.

    They are not trained by gradients; a router's biases are an example.
    """
    buffers = dict(module.named_buffers())
    return {plain_name(name): buffers[name] for name in module.state_dict() if name in buffers}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return list(groups.values())


_RENAMED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        "qwen3_moe": {"num_local_experts": "num_experts"},
    }
)
"""Settings that version 4 has under other names, by the type of the model."""
_APART = ("rope_theta", "partial_rotary_factor")
"""What version 4 has beside the settings that scale positions."""
TOKENIZER_CONFIG, TOKENS = "tokenizer_config.json", "tokenizer.json"
_ADDS_ENDS = re.compile(r"(CodeLlama|Cohere|Gemma|Llama)Tokenizer(Fast)?$")
"""Classes that add tokens at both ends by their settings, whatever tokenizer.json says."""
_KNOWN = "a1"
"""A text of which every tokenizer knows a part."""
_RENAMED_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The names of classes in transformers 5 and 4."""


def add_older_settings(directory: Path) -> None:
    """Add the older form to config.json and tokenizer_config.json, where they are."""
    tokens = directory / TOKENS
    of_file = Tokenizer.from_file(str(tokens)) if tokens.is_file() else None
    forms: tuple[tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
        (CONFIG_NAME, with_older_model),
        (TOKENIZER_CONFIG, partial(with_older_tokenizer, of_file=of_file)),
    )
    for name, add in forms:
        path = directory / name
        if path.is_file():
            settings = add(json.loads(path.read_text(encoding="utf-8")))
            write_whole(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def with_older_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings with `rope_theta`, `rope_scaling` and `torch_dtype`, too."""
    nested = {
        name: with_older_model(part)
        for name, part in config.items()
        if name.endswith("_config") and isinstance(part, dict)
    }
    dtype = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    older = {**config, **nested, **dtype, **_older_rope(config.get("rope_parameters") or {})}
    names = _RENAMED.get(str(config.get("model_type")), {})
    return older | {names[name]: older[name] for name in names.keys() & older.keys()}


def _older_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        return {}  # Gemma 4: version 4 has no such model, and 5 reads the older keys wrongly
    if "full_attention" in rope and "sliding_attention" in rope:  # as Gemma 3 has them
        local = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        return local | _older_rope(rope["full_attention"])
    if "rope_theta" not in rope:
        return {}
    if rope["rope_type"] == "default":
        scaling = None
    elif rope["rope_type"] == "longrope":  # Phi 3 refuses any other key
        factors = {name: rope[name] for name in ("short_factor", "long_factor")}
        scaling = {"type": "longrope", **factors}
    else:
        scaling = {name: value for name, value in rope.items() if name not in _APART}
    return {**{name: rope[name] for name in _APART if name in rope}, "rope_scaling": scaling}


def adds_ends(config: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's class decides in version 4 what is added at both ends."""
    return _ADDS_ENDS.match(str(config.get("tokenizer_class"))) is not None


def with_older_tokenizer(
    config: Mapping[str, Any], of_file: Tokenizer | None = None
) -> dict[str, Any]:
    """Return a tokenizer's settings with its class and special tokens as version 4 reads them.

    `of_file`: what tokenizer.json gives. Version 4's class of Llama adds a token at the beginning
    unless a setting says that there is none, and version 5 does not write it.
    """
    older = dict(config)
    if of_file is not None and adds_ends(config):
        mask = of_file.encode(_KNOWN).special_tokens_mask
        older.setdefault("add_bos_token", mask[:1] == [1])
        older.setdefault("add_eos_token", mask[-1:] == [1])
    if isinstance(name := older.get("tokenizer_class"), str):
        older["tokenizer_class"] = _RENAMED_CLASS.get(name, name)
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older
