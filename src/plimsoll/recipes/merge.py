"""An adapter merged into its base: a plain model, beside both, which stay as they are.

    plimsoll merge ADAPTER --out DIRECTORY

Every weight is computed in float32 and rounded once. An adapter that was trained over a 4-bit base
(QLoRA) has learned to correct that base, rounding included: `--quantization nf4` merges it into
what the 4 bits stand for, and the result computes what the trainer computed.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from plimsoll.config.model import ModelConfig
from plimsoll.data.template import make_template
from plimsoll.model.adapter_files import load_adapter, read_adapter_config
from plimsoll.model.adapters import plain_weight
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PolicyModel, hf_state_names, save_hf
from plimsoll.model.published import saved_buffers, written
from plimsoll.model.value import ValueModel


def merge_adapter(adapter: Path, out: Path, base: str | None, **reading: Any) -> None:
    """Write the merged model as a Hugging Face directory.

    base: the path or name of the model to merge into; default: what the adapter's config names.
    reading: how it is read: keys of `ModelConfig`, such as dtype, which is the merged model's too.

    Raises:
        ConfigError: the adapter or the base cannot be read, or do not fit one another.
    """
    config = read_adapter_config(adapter)
    model = ModelConfig(path=base or config.base_model_name_or_path, **reading)
    module = load_plain(model, is_value=config.task_type == "SEQ_CLS")
    load_adapter(module, config, adapter)
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    write_plain(module, getattr(torch, model.dtype), tokenizer, out)


def write_plain(
    module: PolicyModel | ValueModel,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    chat_template: str | None = None,
) -> None:
    """Write the model without adapters and quantisation, each weight merged out of place.
    chat_template: as `padding_token`."""
    names = hf_state_names(module)
    state = {name: plain_weight(module, own).to(dtype) for own, name in names.items()}
    state |= saved_buffers(module)
    config = deepcopy(module.lm.config)
    if isinstance(module, ValueModel):
        config.get_text_config().pad_token_id = padding_token(tokenizer, chat_template)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    generation = module.lm.generation_config if module.lm.can_generate() else None
    save_hf(config, written(module.lm, state), tokenizer, out, generation)


def padding_token(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> int | None:
    """What a sequence classifier's input is padded with. It is not read at such tokens, so the one
    that ends a sequence, or a turn, will not do; None: transformers then takes one sequence at a
    time. chat_template: as `data.chat_template`."""
    ends = {tokenizer.eos_token}
    if chat_template != "none" and (chat_template or tokenizer.chat_template):
        ends.add(make_template(tokenizer, chat_template, None).turn_end())
    token: int | None = tokenizer.pad_token_id
    return None if tokenizer.pad_token in ends else token


def load_plain(model: ModelConfig, *, is_value: bool) -> PolicyModel | ValueModel:
    """Load a model into host memory."""
    cpu = torch.device("cpu")
    return load_value(model, cpu, seed=0) if is_value else load_policy(model, cpu)
