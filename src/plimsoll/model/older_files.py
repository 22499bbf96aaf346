"""Settings of models and tokenizers in the form of transformers 4, beside that of transformers 5.

transformers 5 writes some settings under new names alone. Version 4 does not find them, and takes
its defaults without a word: a model with `rope_theta` 1,000,000 is computed with 10,000. Version 5
reads both forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from transformers.utils import CONFIG_NAME

from plimsoll.run.files import write_whole

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
