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

from plimsoll.config.model import ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.model.adapter_files import load_adapter, read_adapter_config
from plimsoll.model.adapters import plain_weight
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PolicyModel, hf_state_names, save_hf
from plimsoll.model.value import ValueModel


def merge_adapter(adapter: Path, out: Path, base: str | None, **reading: Any) -> None:
    """Write the merged model as a Hugging Face directory.

    base: the path or name of the model to merge into; default: what the adapter's config names.
    reading: how it is read: keys of `ModelConfig`, such as dtype, which is the merged model's too.

    Raises:
        ConfigError: the adapter or the base cannot be read, or do not fit one another, or `out` is
            there already.
    """
    if out.exists():
        raise ConfigError(f"--out {out} is there already. Choose another directory.")
    config = read_adapter_config(adapter)
    model = ModelConfig(path=base or config.base_model_name_or_path, **reading)
    module = _load(model, is_value=config.task_type == "SEQ_CLS")
    load_adapter(module, config, adapter)
    names = hf_state_names(module)
    state = {name: plain_weight(module, own) for own, name in names.items()}
    written = deepcopy(module.lm.config)
    if hasattr(written, "quantization_config"):
        del written.quantization_config
    generation = module.lm.generation_config if module.lm.can_generate() else None
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    save_hf(written, state, tokenizer, out, generation)


def _load(model: ModelConfig, *, is_value: bool) -> PolicyModel | ValueModel:
    cpu = torch.device("cpu")
    return load_value(model, cpu, seed=0) if is_value else load_policy(model, cpu)
