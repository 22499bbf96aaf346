"""Merge an adapter into its base, and write the result as a third, plain model.

`plimsoll merge ADAPTER --out DIRECTORY`

Every weight is computed in float32 and rounded once. An adapter that was trained with a 4-bit base
(QLoRA) has also learned to correct the base's rounding. `--quantization nf4` merges it into the
dequantized values of the base, so the merged model computes the same as the trainer did.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from plimsoll.config.engine import DecidedDtype, ModelConfig
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError
from plimsoll.model.adapters import load_adapter, plain_weight, read_adapter_config
from plimsoll.model.checks import as_config_error, read_model_config
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import (
    Companions,
    PolicyModel,
    companions,
    hf_state_names,
    save_hf,
    saved_buffers,
    weights_for_files,
)
from plimsoll.model.value import ValueModel
from plimsoll.resolve.model_files import has_tokenizer


def merge_adapter(
    adapter: Path,
    out: Path,
    base: str | None,
    *,
    dtype: DecidedDtype | None = None,
    **reading: Any,
) -> bool:
    """Write the merged model as a Hugging Face directory; return whether it is a value model.

    Args:
        adapter: The directory of the adapter.
        out: The directory to write.
        base: Path or name of the base; None for the base that the adapter's config names.
        dtype: Dtype of the written weights; None for the base's, if it is one of these two,
            and else bfloat16.
        **reading: Keys of `ModelConfig` for loading the base.

    Raises ConfigError if the adapter or the base cannot be read, or do not fit each other.
    """
    config = read_adapter_config(adapter)
    named = base or config.base_model_name_or_path
    if not isinstance(named, str):
        raise ConfigError(
            f"The adapter {str(adapter)!r} does not name its base. Give the path with --base."
        )
    if dtype is None:
        of_base = read_model_config(named, reading.get("trust_remote_code", False)).dtype
        dtype = "float32" if of_base is torch.float32 else "bfloat16"
    model = ModelConfig(path=named, dtype=dtype, **reading)
    module = load_plain(model, is_value=config.task_type == "SEQ_CLS")
    load_adapter(module, config, adapter)
    beside = _companions(module, adapter, model)
    write_plain(module, getattr(torch, dtype), beside, out)
    return isinstance(module, ValueModel)


def _companions(module: PolicyModel | ValueModel, adapter: Path, base: ModelConfig) -> Companions:
    """Return the adapter's tokenizer and generation settings, or the base's if it has none."""
    has_own = has_tokenizer(str(adapter))
    source, trust = str(adapter) if has_own else base.path, base.trust_remote_code
    tokenizer = load_tokenizer(source, trust)
    if has_own and not tokenizer.chat_template:
        tokenizer.chat_template = load_tokenizer(base.path, trust).chat_template
    files = companions(module.lm, tokenizer, "none")
    if files.generation is None or not (adapter / GENERATION_CONFIG_NAME).is_file():
        return files
    with as_config_error(str(adapter), GENERATION_CONFIG_NAME):
        return replace(files, generation=GenerationConfig.from_pretrained(adapter))


def write_plain(
    module: PolicyModel | ValueModel,
    dtype: torch.dtype,
    beside: Companions,
    out: Path,
    chat_template: str | None = None,
) -> None:
    """Write a model as a Hugging Face directory, without adapters and quantization.

    Args:
        module: The model. Its weights do not change: merged weights are copies.
        dtype: Dtype of the written weights.
        beside: Tokenizer and generation settings to write.
        out: The directory to write.
        chat_template: As `data.chat_template`; for the padding token of a value model.
    """
    names = hf_state_names(module)
    state = {name: plain_weight(module, key).to(dtype) for key, name in names.items()}
    state |= saved_buffers(module)
    config = deepcopy(module.lm.config)
    if isinstance(module, ValueModel):
        config.get_text_config().pad_token_id = padding_token(beside.tokenizer, chat_template)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    save_hf(config, weights_for_files(module.lm, state), beside.tokenizer, out, beside.generation)


def padding_token(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> int | None:
    """Return the id of the token that pads a sequence classifier's input, or None.

    It is the tokenizer's padding token, unless this token also ends a sequence or a turn:
    transformers reads no score at padding. With None transformers accepts only one sequence at a
    time. `chat_template` has the form of `data.chat_template`.
    """
    ends = {tokenizer.eos_token}
    if chat_template != "none" and (chat_template or tokenizer.chat_template):
        ends.add(make_template(tokenizer, chat_template, None).turn_end())
    token: int | None = tokenizer.pad_token_id
    return None if tokenizer.pad_token in ends else token


def load_plain(model: ModelConfig, *, is_value: bool) -> PolicyModel | ValueModel:
    """Return a model loaded into host memory, with attention and kernels that a CPU can run."""
    cpu = torch.device("cpu")
    model = model.model_copy(update={"attention": "sdpa", "kernels": "own"})
    return load_value(model, cpu, seed=0) if is_value else load_policy(model, cpu)
